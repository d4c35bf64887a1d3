// The curves of a comparison: every plot has every run, and a run is shown or hidden in all of them at once.
import { call, say } from "./api.js";
import { Plot, Plots, colour, dash } from "./curves.js";
import { element, plain } from "./format.js";

const page = document.getElementById("compare");
const FIRST_CURVES = 9;
const plots = new Plots(FIRST_CURVES);

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
  const metrics = [...new Set(answers.flatMap((one) => Object.keys(one.curves)))];
  plots.add(metrics.map((metric) => {
    const curves = answers.flatMap((one, at) => {
      const found = one.curves[metric];
      return found ? [{ label: plain(names[ids[at]] ?? ids[at]), at, steps: found.steps, values: found.values }] : [];
    });
    return [metric, new Plot(metric, curves, { fromZero: /^(throughput|memory|gpu)\//.test(metric) })];
  }));
  const legend = document.getElementById("legend");
  ids.forEach((id, at) => {
    const box = element("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => { for (const plot of plots.values()) plot.hide(at, !box.checked); });
    legend.append(element("label", {}, box, line(at), element("span", { text: plain(names[id] ?? id) })));
  });
  document.getElementById("no-curves").hidden = metrics.length > 0;
  plots.holder.dataset.ready = "yes";
};

await begin();
