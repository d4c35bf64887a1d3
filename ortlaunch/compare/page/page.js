// Draws the data that the page contains; it loads nothing else. `number` and `ticks` stand before it, in numbers.js.
const data = JSON.parse(document.getElementById("curves").textContent);
const COLOURS = ["#2f7ed8", "#e07b00", "#2a9d55", "#d1383d", "#8a63d2", "#9b6a4f", "#d45fa5", "#7a858f", "#8c8900", "#17a2b8"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const plots = [];

const colour = (run) => COLOURS[run.group % COLOURS.length];
// Repeats of a group have its colour and different dashes. So do groups once the colours are used up.
const dash = (run) => DASHES[(run.repeat + Math.floor(run.group / COLOURS.length)) % DASHES.length];
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const room = (u, labels) => Math.max(44, 18 + 7 * Math.max(0, ...(labels || []).map((one) => one.length)));

// Steps are whole numbers.
const STEPS = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();

const axis = (label) => ({
  label, labelSize: 22, stroke: () => themed("--faint"), font: "12px system-ui, sans-serif",
  labelFont: "12px system-ui, sans-serif", grid: { stroke: () => themed("--line"), width: 1 },
  ticks: { stroke: () => themed("--line"), width: 1 }, values: (u, splits, at, space, step) => ticks(splits, step),
});

// Shows the value of the nearest curve at the pointer.
const tip = (plot, unit) => {
  const box = document.createElement("div");
  box.className = "tip";
  let nearest = null;
  const show = (u) => {
    const at = nearest === null ? null : u.cursor.idxs[nearest];
    const value = at === null || at === undefined ? undefined : u.data[nearest][at];
    box.style.display = value === undefined || value === null ? "none" : "block";
    if (box.style.display === "none") return;
    const run = data.runs[plot.curves[nearest - 1].run];
    box.textContent = `${run.label}: ${number(value)} at ${unit} ${number(u.data[0][at])}`;
    const left = u.valToPos(u.data[0][at], "x");
    box.style.left = left < u.over.clientWidth / 2 ? `${left + 14}px` : "auto";
    box.style.right = left < u.over.clientWidth / 2 ? "auto" : `${u.over.clientWidth - left + 14}px`;
    box.style.top = `${Math.max(0, u.valToPos(value, "y") - 12)}px`;
  };
  return { hooks: {
    init: (u) => u.over.append(box),
    setSeries: (u, at) => { nearest = at; show(u); },
    setCursor: (u) => (u.cursor.left < 0 ? (box.style.display = "none") : show(u)),
  } };
};

// A pause gets an x value without a y value, so that no line crosses it.
const timed = (curve) => {
  const [places, values] = [[], []];
  curve.seconds.forEach((second, at) => {
    if (curve.pauses.includes(at)) {
      places.push((curve.seconds[at - 1] + second) / 2);
      values.push(null);
    }
    places.push(second);
    values.push(curve.values[at]);
  });
  return [places, values];
};

// All curves of a plot share their x values. A thousand runs with their own times would need more of them than a
// browser can hold, so points are moved to the nearest of two thousand x values.
const tables = (curves, over) => {
  const found = curves.map((curve) => (over === "steps" ? [curve.steps, curve.values] : timed(curve)));
  const places = new Set(found.flatMap(([at]) => at));
  if (places.size * curves.length <= 4e6) return found;
  let [low, high] = [Infinity, -Infinity];
  places.forEach((place) => { low = Math.min(low, place); high = Math.max(high, place); });
  const unit = (high - low) / 2000;
  return found.map(([at, values]) => {
    const moved = new Map(at.map((place, n) => [low + Math.round((place - low) / unit) * unit, values[n]]));
    return [[...moved.keys()], [...moved.values()]];
  });
};

const draw = (plot, over, parent) => {
  const place = document.createElement("div");
  place.className = "plot";
  const title = document.createElement("h3");
  title.textContent = `${plot.title} over ${over === "steps" ? "steps" : "time"}`;
  place.append(title);
  parent.append(place);
  // 2: a gap extends to the curve's own neighbouring points, whatever x values other curves have in between.
  const joined = uPlot.join(tables(plot.curves, over), plot.curves.map(() => [0, 2]));
  const series = plot.curves.map((curve) => ({
    label: data.runs[curve.run].label, stroke: colour(data.runs[curve.run]), dash: dash(data.runs[curve.run]), width: 1.75,
    points: { size: 5, fill: colour(data.runs[curve.run]) },
  }));
  const options = {
    width: place.clientWidth, height: 280, legend: { show: false }, focus: { alpha: 0.25 },
    cursor: {
      y: false, focus: { prox: 40 }, points: { size: 7 },
      // Curves have points at different steps; the nearest point of each curve is used.
      dataIdx: (u, at, idx) => {
        const values = u.data[at];
        for (let off = 0; off < values.length; off += 1) {
          if (typeof values[idx - off] === "number") return idx - off;
          if (typeof values[idx + off] === "number") return idx + off;
        }
        return idx;
      },
    },
    scales: { x: { time: false }, y: { range: (u, low, high) => bounds(low, high, plot.fromZero) } },
    axes: [
      over === "steps"
        ? { ...axis("step"), size: 34, incrs: STEPS }
        : { ...axis("seconds since the start of the run"), size: 34 },
      { ...axis(""), labelSize: 0, size: room },
    ],
    series: [{}, ...series],
    plugins: [tip(plot, over === "steps" ? "step" : "second")],
  };
  plots.push({ plot, place, u: new uPlot(options, joined, place) });
};

const bounds = (low, high, fromZero) => {
  if (low === null || low === undefined) return [0, 1];
  const room = (high - (fromZero ? Math.min(0, low) : low)) * 0.05 || Math.abs(high) * 0.05 || 1;
  return [fromZero && low >= 0 ? 0 : low - room, high + room];
};

const legend = () => {
  const place = document.getElementById("runs");
  const boxes = data.runs.map((run, at) => {
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = true;
    box.addEventListener("change", () => show(at, box.checked));
    const name = document.createElement("span");
    name.textContent = run.label;
    label.append(box, sample(run), name);
    place.append(label);
    return box;
  });
  const all = (text, checked) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => boxes.forEach((box, at) => { box.checked = checked; show(at, checked); }));
    place.append(button);
  };
  all("all", true);
  all("none", false);
};

const sample = (run) => {
  const make = (kind, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    return element;
  };
  const picture = make("svg", { width: 28, height: 8, "aria-hidden": "true" });
  picture.append(make("line", { x1: 0, y1: 4, x2: 28, y2: 4, stroke: colour(run), "stroke-width": 2.5, "stroke-dasharray": dash(run).join(" ") }));
  return picture;
};

const show = (run, shown) => plots.forEach(({ plot, u }) => plot.curves.forEach((curve, at) => {
  if (curve.run === run) u.setSeries(at + 1, { show: shown });
}));

legend();
const parent = document.getElementById("plots");
data.plots.forEach((plot) => ["steps", "seconds"].forEach((over) => draw(plot, over, parent)));
const fit = () => plots.forEach(({ place, u }) => {
  if (place.clientWidth !== u.width) u.setSize({ width: place.clientWidth, height: 280 });
});
fit();
window.addEventListener("resize", fit);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(({ u }) => u.redraw(false)));
