// Curves by uPlot, drawn when they come into view: a page of 400 costs as much as what is seen of it.
import { count, element, number, ticks } from "./format.js";

const COLOURS = ["#2f7ed8", "#e07b00", "#2a9d55", "#d1383d", "#8a63d2", "#9b6a4f", "#d45fa5", "#7a858f", "#8c8900", "#17a2b8"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const HEIGHT = 220;
const MOST_POINTS = 2000;

// What people look for first comes first; times of the start, which are one point each, come last.
const FIRST = [/^train\/loss$/, /loss/, /^throughput\/(tokens|samples)_per_second$/, /^memory\//, /^train\//, /^throughput\//];
const rank = (name) => {
  const found = FIRST.findIndex((kind) => kind.test(name));
  return found >= 0 ? found : FIRST.length + Number(name.startsWith("startup/"));
};
const inOrder = (names) => [...names].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));

// Steps are whole numbers.
const STEPS = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();
const room = (u, labels) => Math.max(44, 18 + 7 * Math.max(0, ...(labels ?? []).map((one) => one.length)));

export const colour = (at) => COLOURS[at % COLOURS.length];
export const dash = (at) => DASHES[Math.floor(at / COLOURS.length) % DASHES.length];
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const axis = (more) => ({
  stroke: () => themed("--faint"), font: "12px system-ui, sans-serif",
  grid: { stroke: () => themed("--line"), width: 1 }, ticks: { stroke: () => themed("--line"), width: 1 },
  values: (u, splits, at, space, step) => ticks(splits, step), ...more,
});

const bounds = (low, high, fromZero) => {
  if (low === null || low === undefined || !Number.isFinite(low)) return [0, 1];
  const foot = fromZero && low >= 0 ? 0 : low;
  const room = (high - foot) * 0.06 || Math.abs(high) * 0.06 || 1;
  return [foot === 0 && fromZero ? 0 : low - room, high + room];
};

// The value of the curve nearest to the pointer.
const tip = (labels) => {
  const box = element("div", { class: "tip", hidden: true });
  let nearest = null;
  const show = (u) => {
    const at = nearest === null ? null : u.cursor.idxs[nearest];
    const value = at === null || at === undefined ? undefined : u.data[nearest][at];
    box.hidden = value === undefined || value === null;
    if (box.hidden) return;
    const label = labels[nearest - 1];
    box.textContent = `${label ? `${label}: ` : ""}${number(value)} at step ${count(u.data[0][at])}`;
    const left = u.valToPos(u.data[0][at], "x");
    const before = left < u.over.clientWidth / 2;
    box.style.left = before ? `${left + 14}px` : "auto";
    box.style.right = before ? "auto" : `${u.over.clientWidth - left + 14}px`;
    box.style.top = `${Math.max(0, u.valToPos(value, "y") - 12)}px`;
  };
  return { hooks: {
    init: (u) => u.over.append(box),
    setSeries: (u, at) => { nearest = at; show(u); },
    setCursor: (u) => { if (u.cursor.left < 0) box.hidden = true; else show(u); },
  } };
};

export class Plot {
  // curves: [{label, steps, values, at}], `at` gives the colour.
  constructor(title, curves, { fromZero = false } = {}) {
    this.curves = curves;
    this.fromZero = fromZero;
    this.hidden = new Set();
    this.u = null;
    this.place = element("section", { class: "plot", "aria-label": title }, element("h3", { text: title }));
    seen.observe(this.place);
    plots.set(this.place, this);
  }

  table() {
    const tables = this.curves.map((curve) => [curve.steps, curve.values]);
    return tables.length === 1 ? tables[0] : uPlot.join(tables, tables.map(() => [0, 2]));
  }

  draw() {
    const series = this.curves.map((curve) => ({
      label: curve.label, stroke: colour(curve.at), dash: dash(curve.at), width: 1.75, spanGaps: this.curves.length > 1,
      show: !this.hidden.has(curve.at), points: { size: 5, fill: colour(curve.at) },
    }));
    const nearby = (u, at, idx) => {
      const values = u.data[at];
      for (let off = 0; off < values.length; off += 1) {
        if (typeof values[idx - off] === "number") return idx - off;
        if (typeof values[idx + off] === "number") return idx + off;
      }
      return idx;
    };
    this.u = new uPlot({
      width: this.place.clientWidth, height: HEIGHT, legend: { show: false }, focus: { alpha: 0.3 },
      cursor: { y: false, focus: { prox: 1e6 }, points: { size: 7 }, dataIdx: nearby },
      scales: { x: { time: false }, y: { range: (u, low, high) => bounds(low, high, this.fromZero) } },
      axes: [
        axis({ size: 32, incrs: STEPS, label: "step", labelSize: 18, labelFont: "12px system-ui, sans-serif", labelGap: 0 }),
        axis({ size: room }),
      ],
      series: [{}, ...series], plugins: [tip(this.curves.map((curve) => curve.label))],
    }, this.table(), this.place);
  }

  add(at, points) {
    const curve = this.curves[at];
    for (const [step, value] of points) {
      // Of a step that comes again the first value counts.
      if (step <= (curve.steps.at(-1) ?? -Infinity)) continue;
      curve.steps.push(step);
      curve.values.push(value);
    }
    while (curve.steps.length > MOST_POINTS) {
      curve.steps = curve.steps.filter((_, n) => n % 2 === 0);
      curve.values = curve.values.filter((_, n) => n % 2 === 0);
    }
    this.u?.setData(this.table());
  }

  // A resumed run goes back to its checkpoint's step; what came after it is made anew.
  rewind(to) {
    for (const curve of this.curves) {
      const kept = curve.steps.filter((step) => step <= to).length;
      curve.steps.length = kept;
      curve.values.length = kept;
    }
    this.u?.setData(this.table());
  }

  hide(at, gone) {
    if (gone) this.hidden.add(at);
    else this.hidden.delete(at);
    this.curves.forEach((curve, n) => { if (curve.at === at) this.u?.setSeries(n + 1, { show: !gone }); });
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.u && width && width !== this.u.width) this.u.setSize({ width, height: HEIGHT });
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

const plots = new Map();
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    const plot = plots.get(target);
    if (isIntersecting && plot && !plot.u) plot.draw();
  }
}, { rootMargin: "300px" });
addEventListener("resize", () => { for (const plot of plots.values()) plot.resize(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const plot of plots.values()) plot.u?.redraw(); });
