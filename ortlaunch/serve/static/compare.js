// The curves of a comparison: every plot has every run, and a run is shown or hidden in all of them at once.
import { call, say } from "./api.js";
import { Plot, colour, dash, inOrder } from "./curves.js";
import { element, plain } from "./format.js";

const page = document.getElementById("compare");
const holder = document.getElementById("plots");
const plots = [];

const line = (at) => {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const set = { x1: 0, y1: 5, x2: 28, y2: 5, stroke: colour(at), "stroke-width": 3, "stroke-dasharray": dash(at).join(" ") };
  for (const [name, value] of Object.entries(set)) stroke.setAttribute(name, value);
  svg.setAttribute("width", 28);
  svg.setAttribute("height", 10);
  svg.setAttribute("aria-hidden", "true");
  svg.append(stroke);
  return svg;
};

const ids = page.dataset.ids.split(",").filter(Boolean);
// Many runs get fewer points each: a plot is no wider than some hundred pixels.
const POINTS = ids.length > 6 ? 200 : 1000;
const begin = async () => {
  const names = JSON.parse(page.dataset.names);
  const answers = await Promise.all(ids.map((id) => call("GET", `/api/runs/${encodeURIComponent(id)}/metrics?points=${POINTS}`).catch((error) => {
    say(`${names[id] ?? id}: ${error.message}`, true);
    return { curves: {} };
  })));
  const metrics = inOrder(new Set(answers.flatMap((one) => Object.keys(one.curves))));
  for (const metric of metrics) {
    const curves = answers.flatMap((one, at) => {
      const found = one.curves[metric];
      return found ? [{ label: plain(names[ids[at]] ?? ids[at]), at, steps: found.steps, values: found.values }] : [];
    });
    const plot = new Plot(metric, curves, { fromZero: /^(throughput|memory|gpu)\//.test(metric) });
    plots.push([metric, plot]);
    holder.append(plot.place);
  }
  const legend = document.getElementById("legend");
  ids.forEach((id, at) => {
    const box = element("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => plots.forEach(([, plot]) => plot.hide(at, !box.checked)));
    legend.append(element("label", {}, box, line(at), element("span", { text: plain(names[id] ?? id) })));
  });
  document.getElementById("no-curves").hidden = metrics.length > 0;
  holder.dataset.ready = "yes";
};

const filter = document.getElementById("curve-filter");
filter.addEventListener("input", () => {
  const word = filter.value.trim().toLowerCase();
  for (const [name, plot] of plots) plot.place.hidden = !name.toLowerCase().includes(word);
});
await begin();
