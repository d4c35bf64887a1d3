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
// How all plots of the page are drawn.
export const view = { smoothing: 0, across: "step", logY: false };

// The seconds at some steps, of the steps whose seconds are known; between them and after them as they were on average.
const secondsAt = (steps, { steps: known, values }) => {
  let at = 1;
  return steps.map((step) => {
    while (at < known.length - 1 && known[at] < step) at += 1;
    if (known.length < 2) return values[0] ?? 0;
    return values[at - 1] + (values[at] - values[at - 1]) * (step - known[at - 1]) / (known[at] - known[at - 1]);
  });
};

// The exponential average, as if it had begun long ago.
const smoothed = (values, weight) => {
  let [sum, share] = [0, 0];
  return values.map((value) => {
    if (typeof value !== "number") return value;
    [sum, share] = [weight * sum + (1 - weight) * value, weight * share + 1 - weight];
    return sum / share;
  });
};

export class MetricPlot extends Plot {
  constructor(name, curves) {
    const made = curves.map(({ label, at, steps, values, times }) => ({ label, at, group: at, x: steps, values, times }));
    super(name, made, { fromZero: /^(throughput|memory|gpu)\//.test(name), unit: view.across, logY: view.logY });
  }

  table() {
    return this.joined(this.curves.map(({ x, values, times }) => [
      view.across === "step" || !times ? x : secondsAt(x, times),
      (view.smoothing ? smoothed(values, view.smoothing) : values).map((one) => (view.logY && one <= 0 ? null : one)),
    ]));
  }

  restyle() {
    const wasDrawn = this.u !== null;
    this.u?.destroy();
    Object.assign(this, { u: null, unit: view.across, logY: view.logY });
    if (wasDrawn) this.draw();
  }

  // Whoever has zoomed in stays there.
  refresh() {
    if (!this.u) return;
    const [x, { min, max }] = [this.u.data[0], this.u.scales.x];
    this.u.setData(this.table(), !(min > x[0] || max < x.at(-1)));
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
    this.refresh();
  }

  // A resumed run goes back to its checkpoint's step; what came after it is made anew.
  rewind(to) {
    for (const curve of this.curves) {
      const kept = curve.x.filter((step) => step <= to).length;
      curve.x.length = kept;
      curve.values.length = kept;
    }
    this.refresh();
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
    const [smoothing, across, logY] = ["smoothing", "across", "log-y"].map((one) => document.getElementById(one));
    for (const one of [smoothing, across, logY]) {
      one.addEventListener("input", () => {
        Object.assign(view, { smoothing: Number(smoothing.value), across: across.value, logY: logY.checked });
        for (const plot of this.shown.values()) plot.restyle();
      });
    }
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
