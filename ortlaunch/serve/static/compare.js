// The curves of a comparison: every plot has every run, and a run is shown or hidden in all of them at once.
import { call, say } from "./api.js";
import { AT_ONCE, MetricPlot, Plots } from "./curves.js";
import { plain } from "./format.js";
import { legend } from "./plot.js";

const page = document.getElementById("compare");
const FIRST_CURVES = 9;
const plots = new Plots(FIRST_CURVES);

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
    return { curves: {}, names: [], times: { steps: [], values: [] } };
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
        return found ? [{ label: nameOf(ids[at]), at, steps: found.steps, values: found.values, times: run.times }] : [];
      });
      const plot = new MetricPlot(metric, curves);
      hidden.forEach((at) => plot.hide(at, true));
      return [metric, plot];
    });
  };
  const first = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  plots.add(await plotted(first));
  const all = [...new Set(runs.flatMap((run) => run.names))];
  plots.lack(all.filter((metric) => !first.includes(metric)), plotted);
  legend(document.getElementById("legend"), ids.map((id, at) => ({ label: nameOf(id), group: at })), (at, shown) => {
    if (shown) hidden.delete(at);
    else hidden.add(at);
    for (const plot of plots.values()) plot.hide(at, !shown);
  });
  document.getElementById("no-curves").hidden = all.length > 0;
  plots.holder.dataset.ready = "yes";
};

await begin();
