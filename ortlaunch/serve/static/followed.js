// The curves, logs and configuration of a run that has a folder.
import { call, say, working } from "./api.js";
import { MetricPlot, Plots } from "./curves.js";
import { element, plain } from "./format.js";
import { Log } from "./log.js";
import { subscribe } from "./stream.js";

// The log stands below the curves and must not be far away.
const FIRST_CURVES = 6;
const LOOK_AGAIN = 5000;
const plots = new Plots(FIRST_CURVES);
const nothing = document.getElementById("no-curves");

let times = { steps: [], values: [] };
let began = 0;
const made = (name, curve) => [name, new MetricPlot(name, [{ label: "", at: 0, times, ...curve }])];

const draw = async (path) => {
  const answer = await call("GET", `${path}/metrics`);
  ({ times, began } = answer);
  const plotted = ({ curves }) => Object.entries(curves).map(([name, curve]) => made(name, curve));
  plots.add(plotted(answer));
  plots.lack(answer.names.filter((name) => !(name in answer.curves)), async (names) => {
    try {
      return plotted(await call("GET", `${path}/metrics?names=${encodeURIComponent(names.join(","))}`));
    } catch (error) { say(error.message, true); return []; }
  });
  nothing.hidden = answer.names.length > 0;
  return answer.offset;
};

const take = ({ points, rewound, times: later = [] }) => {
  for (const [step, at] of later) {
    if (step <= (times.steps.at(-1) ?? -1)) continue;
    began ||= at;
    times.steps.push(step);
    times.values.push(at - began);
  }
  if (rewound !== undefined && rewound !== null) for (const plot of plots.values()) plot.rewind(rewound);
  // What somebody asks for later comes then as a whole.
  const found = Object.entries(points ?? {}).filter(([name]) => !plots.lacks(name));
  const added = found.filter(([name]) => !plots.get(name));
  if (added.length) plots.add(added.map(([name]) => made(name, { steps: [], values: [] })));
  for (const [name, values] of found) plots.get(name).add(0, values);
  if (found.length) nothing.hidden = true;
};

// The workers of a run that has just begun have no log yet: the page is made anew when they have.
let looked = 0;
let nextLook = 0;
const lookForLogs = (path, hasLog) => {
  // What comes too early is looked at later: nothing may come after it.
  if (nextLook) return;
  nextLook = setTimeout(async () => {
    nextLook = 0;
    looked = Date.now();
    const { ranks, logs } = await call("GET", path);
    if (ranks.length || (!hasLog && logs.length)) location.reload();
  }, Math.max(0, looked + LOOK_AGAIN - Date.now()));
};

const compareWith = (path) => {
  const form = document.getElementById("against");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    working(form.querySelector("button"), async () => {
      const other = new FormData(form).get("other").trim();
      const { differences } = await call("GET", `${path}/config?against=${encodeURIComponent(other)}`);
      const place = document.getElementById("differences");
      if (!differences.length) { place.replaceChildren(element("p", { text: "Both have the same configuration." })); return; }
      const head = element("tr", {}, ...["Key", "This run", "The other"].map((text) => element("th", { text, scope: "col" })));
      const lines = differences.map(({ key, value, other: its }) =>
        element("tr", {}, ...[key, value ?? "–", its ?? "–"].map((text) => element("td", { text: plain(text), class: "any" }))));
      place.replaceChildren(element("div", { class: "wide" },
        element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines))));
    });
  });
};

export const follow = async (id, path, showState) => {
  const log = new Log(id, document.getElementById("log"));
  const hasLog = log.rank.value !== "";
  const hasRanks = [...log.rank.options].some((one) => /^\d+$/.test(one.value));
  compareWith(path);
  const from = await draw(path);
  subscribe(`run:${id}@${from}`, (data) => {
    if (data.again) { location.reload(); return; }
    take(data);
    if (data.row) showState(data.row);
    if (!hasRanks) lookForLogs(path, hasLog);
  });
  if (hasLog) await log.open();
};
