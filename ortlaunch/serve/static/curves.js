// The curves of a page of the service: which plots it has, and what comes to them while a run goes on.
import { Plot } from "./plot.js";

const MOST_POINTS = 2000;

// What people look for first comes first; times of the start, which are one point each, come last.
const FIRST = [/^train\/loss$/, /loss/, /^throughput\/(tokens|samples)_per_second$/, /^memory\//, /^train\//, /^throughput\//];
const rank = (name) => {
  const found = FIRST.findIndex((kind) => kind.test(name));
  return found >= 0 ? found : FIRST.length + Number(name.startsWith("startup/"));
};
const inOrder = (names) => [...names].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));

// The plot of a metric; its curves are [{label, at, steps, values}], `at` being the run.
export class MetricPlot extends Plot {
  constructor(name, curves) {
    const made = curves.map(({ label, at, steps, values }) => ({ label, at, group: at, x: steps, values }));
    super(name, made, { fromZero: /^(throughput|memory|gpu)\//.test(name) });
  }

  add(at, points) {
    const curve = this.curves[at];
    for (const [step, value] of points) {
      // Of a step that comes again the first value counts.
      if (step <= (curve.x.at(-1) ?? -Infinity)) continue;
      curve.x.push(step);
      curve.values.push(value);
    }
    while (curve.x.length > MOST_POINTS) {
      curve.x = curve.x.filter((_, n) => n % 2 === 0);
      curve.values = curve.values.filter((_, n) => n % 2 === 0);
    }
    this.u?.setData(this.table());
  }

  // A resumed run goes back to its checkpoint's step; what came after it is made anew.
  rewind(to) {
    for (const curve of this.curves) {
      const kept = curve.x.filter((step) => step <= to).length;
      curve.x.length = kept;
      curve.values.length = kept;
    }
    this.u?.setData(this.table());
  }
}

// So many metrics are asked for at once; the server gives no more than 40.
export const AT_ONCE = 30;

// The plots of a page: in order whenever their figures come, the first ones until somebody asks for all or for a name.
export class Plots {
  constructor(most) {
    this.most = most;
    this.shown = new Map();
    this.lacking = [];
    this.holder = document.getElementById("plots");
    this.filter = document.getElementById("curve-filter");
    this.all = document.getElementById("all-curves");
    this.filter.addEventListener("input", () => { this.choose(); this.complete(); });
    this.all.addEventListener("click", () => { this.most = Infinity; this.choose(); this.complete(); });
  }

  // Metrics without a plot yet, and `fetch`, which gives [[name, plot]] for some of them once somebody asks for more.
  lack(names, fetch) {
    this.lacking = names;
    this.fetch = fetch;
    this.choose();
  }

  lacks(name) { return this.lacking.includes(name); }

  async complete() {
    if (this.isCompleting) return;
    this.isCompleting = true;
    try {
      while (this.lacking.length) {
        const some = this.lacking.slice(0, AT_ONCE);
        const found = await this.fetch(some);
        this.lacking = this.lacking.slice(some.length);
        this.add(found);
      }
    } finally { this.isCompleting = false; }
  }

  get(name) { return this.shown.get(name); }
  values() { return this.shown.values(); }

  // Adds plots, [[name, plot]].
  add(added) {
    for (const [name, plot] of added) this.shown.set(name, plot);
    this.shown = new Map(inOrder(this.shown.keys()).map((name) => [name, this.shown.get(name)]));
    [...this.shown.values()].forEach(({ place }, at) => {
      if (this.holder.children[at] !== place) this.holder.insertBefore(place, this.holder.children[at] ?? null);
    });
    this.choose();
  }

  choose() {
    const word = this.filter.value.trim().toLowerCase();
    let shown = 0;
    for (const [name, { place }] of this.shown) {
      place.hidden = !name.toLowerCase().includes(word) || (!word && shown >= this.most);
      if (!place.hidden) shown += 1;
    }
    const size = this.shown.size + this.lacking.length;
    this.all.hidden = Boolean(word) || size <= this.most;
    this.all.textContent = `Show all ${size} curves`;
  }
}
