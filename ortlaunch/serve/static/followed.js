// The curves, logs and configuration of a run that has a folder.
import { call, working } from "./api.js";
import { Plot, inOrder } from "./curves.js";
import { element, plain } from "./format.js";
import { Log } from "./log.js";
import { subscribe } from "./stream.js";

// The log stands below the curves and must not be far away.
const FIRST_CURVES = 6;
const FROM_ZERO = /^(throughput|memory|gpu)\//;
const LOOK_AGAIN = 5000;
const plots = new Map();
const holder = document.getElementById("plots");
const nothing = document.getElementById("no-curves");
const filter = document.getElementById("curve-filter");
const all = document.getElementById("all-curves");
let drawn = false;
let most = FIRST_CURVES;

const choose = () => {
  const word = filter.value.trim().toLowerCase();
  let shown = 0;
  for (const [name, plot] of plots) {
    plot.place.hidden = !name.toLowerCase().includes(word) || (!word && shown >= most);
    if (!plot.place.hidden) shown += 1;
  }
  all.hidden = Boolean(word) || plots.size <= most;
  all.textContent = `Show all ${plots.size} curves`;
};
filter.addEventListener("input", choose);
all.addEventListener("click", () => { most = Infinity; choose(); });

const plotOf = (name, curve) => {
  if (!plots.has(name)) {
    const plot = new Plot(name, [{ label: "", at: 0, ...curve }], { fromZero: FROM_ZERO.test(name) });
    plots.set(name, plot);
    holder.append(plot.place);
    if (drawn) choose();
  }
  return plots.get(name);
};

const draw = async (path) => {
  const answer = await call("GET", `${path}/metrics`);
  const names = inOrder(Object.keys(answer.curves));
  for (const name of names) plotOf(name, answer.curves[name]);
  drawn = true;
  choose();
  nothing.hidden = names.length > 0;
  return answer.offset;
};

const take = ({ points, rewound }) => {
  if (rewound !== undefined && rewound !== null) for (const plot of plots.values()) plot.rewind(rewound);
  for (const [name, found] of Object.entries(points ?? {})) {
    nothing.hidden = true;
    plotOf(name, { steps: [], values: [] }).add(0, found);
  }
};

// A run that has just begun has no log yet: the page is made anew when it has.
let looked = 0;
const lookForLogs = async (path) => {
  if (Date.now() - looked < LOOK_AGAIN) return;
  looked = Date.now();
  const { ranks, logs } = await call("GET", path);
  if (ranks.length || logs.length) location.reload();
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
  compareWith(path);
  const from = await draw(path);
  subscribe(`run:${id}@${from}`, (data) => {
    if (data.again) { location.reload(); return; }
    take(data);
    if (data.row) showState(data.row);
    if (!hasLog) lookForLogs(path);
  });
  if (hasLog) await log.open();
};
