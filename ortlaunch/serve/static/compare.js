// The curves of a comparison: every plot has every run, and a run is shown or hidden in all of them at once.
import { call, say } from "./api.js";
import { AT_ONCE, Plot, Plots, colour, dash } from "./curves.js";
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
const names = JSON.parse(page.dataset.names);
const nameOf = (id) => plain(names[id] ?? id);
const hidden = new Set();

const curvesOf = async (id, more = "") => {
  try {
    return await call("GET", `/api/runs/${encodeURIComponent(id)}/metrics?points=${POINTS}${more}`);
  } catch (error) {
    say(`${names[id] ?? id}: ${error.message}`, true);
    return { curves: {}, names: [] };
  }
};

const begin = async () => {
  const runs = await Promise.all(ids.map((id) => curvesOf(id)));
  // A run that has more metrics than come at once may not have those of another one among them.
  const fill = (metrics) => Promise.all(runs.map(async (run, at) => {
    const missing = metrics.filter((metric) => run.names.includes(metric) && !(metric in run.curves));
    for (let from = 0; from < missing.length; from += AT_ONCE) {
      const some = missing.slice(from, from + AT_ONCE);
      const { curves } = await curvesOf(ids[at], `&names=${encodeURIComponent(some.join(","))}`);
      Object.assign(run.curves, curves);
    }
  }));
  const plotted = async (metrics) => {
    await fill(metrics);
    return metrics.map((metric) => {
      const curves = runs.flatMap((run, at) => {
        const found = run.curves[metric];
        return found ? [{ label: nameOf(ids[at]), at, steps: found.steps, values: found.values }] : [];
      });
      const plot = new Plot(metric, curves, { fromZero: /^(throughput|memory|gpu)\//.test(metric) });
      hidden.forEach((at) => plot.hide(at, true));
      return [metric, plot];
    });
  };
  const first = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  plots.add(await plotted(first));
  const all = [...new Set(runs.flatMap((run) => run.names))];
  plots.lack(all.filter((metric) => !first.includes(metric)), plotted);
  const legend = document.getElementById("legend");
  ids.forEach((id, at) => {
    const box = element("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(at);
      else hidden.add(at);
      for (const plot of plots.values()) plot.hide(at, !box.checked);
    });
    legend.append(element("label", {}, box, line(at), element("span", { text: nameOf(id) })));
  });
  document.getElementById("no-curves").hidden = all.length > 0;
  plots.holder.dataset.ready = "yes";
};

await begin();
