// Curves by uPlot, drawn when they come into view: a page of 400 costs as much as what is seen of it.
import { element } from "./element.js";
import { number, ticks } from "./numbers.js";

const COLOURS = ["#2f7ed8", "#e07b00", "#2a9d55", "#d1383d", "#8a63d2", "#9b6a4f", "#d45fa5", "#7a858f", "#8c8900", "#17a2b8"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const HEIGHT = 240;
const FONT = "system-ui, sans-serif";
const UNITS = { step: "step", second: "seconds since the start of the run" };

// Steps are whole numbers.
const STEPS = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();
const LOG = { distr: 3 };
const LOG_TICKS = { values: (u, splits) => splits.map((one) => (one === null ? "" : number(one))) };
const room = (u, labels) => Math.max(44, 18 + 7 * Math.max(0, ...(labels ?? []).map((one) => one.length)));

const colour = ({ group }) => COLOURS[group % COLOURS.length];
// Repeats of a group have its colour and other dashes. So do groups once the colours are used up.
const dash = ({ group, repeat = 0 }) => DASHES[(repeat + Math.floor(group / COLOURS.length)) % DASHES.length];
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const axis = (more) => ({
  stroke: () => themed("--faint"), font: `12px ${FONT}`,
  grid: { stroke: () => themed("--line"), width: 1 }, ticks: { stroke: () => themed("--line"), width: 1 },
  values: (u, splits, at, space, step) => ticks(splits, step), ...more,
});

const bounds = (low, high, fromZero) => {
  if (low === null || low === undefined || !Number.isFinite(low)) return [0, 1];
  const foot = fromZero && low >= 0 ? 0 : low;
  const margin = (high - foot) * 0.06 || Math.abs(high) * 0.06 || 1;
  return [foot === 0 && fromZero ? 0 : low - margin, high + margin];
};

// Curves have points at different places; of each curve the nearest is meant.
const nearby = (u, at, idx) => {
  const values = u.data[at];
  for (let off = 0; off < values.length; off += 1) {
    if (typeof values[idx - off] === "number") return idx - off;
    if (typeof values[idx + off] === "number") return idx + off;
  }
  return idx;
};

// The value of the curve nearest to the pointer.
const tip = (curves, unit, names) => {
  const box = element("div", { class: "tip", hidden: true });
  let nearest = null;
  const show = (u) => {
    const at = nearest === null ? null : u.cursor.idxs[nearest];
    const value = at === null || at === undefined ? undefined : u.data[nearest][at];
    box.hidden = value === undefined || value === null;
    if (box.hidden) return;
    const { label } = curves[nearest - 1];
    box.textContent = `${label ? `${label}: ` : ""}${number(value)} at ${unit} ${names?.[u.data[0][at]] ?? number(u.data[0][at])}`;
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
  // curves: [{label, at, group, repeat, x, values}]; `at` is the run, `group` gives the colour, `repeat` the dashes.
  // `names` stand for the x values 0, 1, …; `logX` and `logY` draw by the logarithm.
  constructor(title, curves, { fromZero = false, unit = "step", names = null, logX = false, logY = false } = {}) {
    Object.assign(this, { title, curves, fromZero, unit, names, logX, logY, hidden: new Set(), u: null });
    const save = element("button", { type: "button", class: "save", text: "PNG", "aria-label": `Save ${title} as a picture` });
    save.addEventListener("click", () => this.save());
    this.place = element("section", { class: "plot", "aria-label": title }, element("h3", { text: title }), save);
    seen.observe(this.place);
    known.set(this.place, this);
  }

  table() { return this.joined(this.curves.map((curve) => [curve.x, curve.values])); }

  joined(tables) {
    // 2: a gap extends to the curve's own neighbouring points, whatever x values other curves have in between.
    return tables.length === 1 ? tables[0] : uPlot.join(tables, tables.map(() => [0, 2]));
  }

  draw() {
    if (this.u) return;
    const series = this.curves.map((curve) => ({
      label: curve.label, stroke: colour(curve), dash: dash(curve), width: 1.75,
      show: !this.hidden.has(curve.at), points: { size: 5, fill: colour(curve) },
    }));
    const label = { label: UNITS[this.unit] ?? this.unit, labelSize: 18, labelFont: `12px ${FONT}`, labelGap: 0 };
    this.u = new uPlot({
      width: this.place.clientWidth, height: HEIGHT, legend: { show: false }, focus: { alpha: 0.3 },
      cursor: { y: false, focus: { prox: 1e6 }, points: { size: 7 }, dataIdx: nearby },
      scales: {
        x: { time: false, ...(this.logX ? LOG : {}), ...(this.names ? { range: [-0.5, this.names.length - 0.5] } : {}) },
        y: this.logY ? LOG : { range: (u, low, high) => bounds(low, high, this.fromZero) },
      },
      axes: [axis({ size: 32, ...label, ...this.ticks() }), axis({ size: room, ...(this.logY ? LOG_TICKS : {}) })],
      series: [{}, ...series], plugins: [tip(this.curves, UNITS[this.unit] ? this.unit : `${this.unit} =`, this.names)],
    }, this.table(), this.place);
  }

  ticks() {
    if (this.names) return { incrs: [1], values: (u, splits) => splits.map((one) => this.names[one] ?? "") };
    if (this.logX) return LOG_TICKS;
    return this.unit === "step" ? { incrs: STEPS } : {};
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

  // The plot with its title and the names of its curves.
  async picture() {
    this.draw();
    // uPlot draws what is new when the script has ended.
    await new Promise(requestAnimationFrame);
    const plot = this.u.ctx.canvas;
    const scale = plot.width / this.u.width;
    const [head, line] = [28 * scale, 20 * scale];
    const named = this.curves.filter((curve) => curve.label && !this.hidden.has(curve.at));
    const canvas = element("canvas", { width: plot.width, height: head + plot.height + line * named.length });
    const context = canvas.getContext("2d");
    context.fillStyle = themed("--back");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(plot, 0, head);
    context.fillStyle = themed("--text");
    context.font = `600 ${14 * scale}px ${FONT}`;
    context.fillText(this.title, 8 * scale, 19 * scale);
    context.font = `${12 * scale}px ${FONT}`;
    context.lineWidth = 2 * scale;
    named.forEach((curve, n) => {
      const y = head + plot.height + line * (n + 0.5);
      context.strokeStyle = colour(curve);
      context.setLineDash(dash(curve).map((one) => one * scale));
      context.beginPath();
      context.moveTo(8 * scale, y);
      context.lineTo(36 * scale, y);
      context.stroke();
      context.fillText(curve.label, 44 * scale, y + 4 * scale);
    });
    return canvas;
  }

  async save() {
    const picture = await this.picture();
    element("a", { download: `${this.title.replace(/[^\w.-]+/g, "-")}.png`, href: picture.toDataURL("image/png") }).click();
  }
}

const sample = (run) => {
  const make = (kind, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    return made;
  };
  const picture = make("svg", { width: 28, height: 8, "aria-hidden": "true" });
  const stroke = { stroke: colour(run), "stroke-width": 2.5, "stroke-dasharray": dash(run).join(" ") };
  picture.append(make("line", { x1: 0, y1: 4, x2: 28, y2: 4, ...stroke }));
  return picture;
};

// A box for each run, which shows or hides it: runs are [{label, group, repeat}], and `show` takes its place among them.
export const legend = (holder, runs, show) => {
  const boxes = runs.map((run, at) => {
    const box = element("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => show(at, box.checked));
    holder.append(element("label", {}, box, sample(run), element("span", { text: run.label })));
    return box;
  });
  for (const [text, checked] of [["all", true], ["none", false]]) {
    const button = element("button", { type: "button", text });
    button.addEventListener("click", () => boxes.forEach((box, at) => { box.checked = checked; show(at, checked); }));
    holder.append(button);
  }
};

const known = new Map();
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) known.get(target)?.draw();
}, { rootMargin: "300px" });
addEventListener("resize", () => { for (const plot of known.values()) plot.resize(); });
addEventListener("beforeprint", () => { for (const plot of known.values()) plot.draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const plot of known.values()) plot.u?.redraw(); });
