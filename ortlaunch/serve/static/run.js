// One run: figures and curves that follow the stream, its log, and what can be done with it.
import { agreed, call, say, working } from "./api.js";
import { Plot } from "./curves.js";
import { element, plain } from "./format.js";
import { Log } from "./log.js";
import { fillIn } from "./row.js";
import { subscribe } from "./stream.js";

const page = document.getElementById("run");
const id = page.dataset.id;
const path = `/api/runs/${encodeURIComponent(id)}`;
const plots = new Map();
let drawn = false;
const AWAITED = new Set(["waiting", "starting", "refused", "cancelled"]);
const holder = document.getElementById("plots");
// The log stands below them and must not be far away.
const FIRST_CURVES = 6;
const FROM_ZERO = /^(throughput|memory|gpu)\//;

const QUESTIONS = {
  cancel: ["Stop this run? It writes a checkpoint first where it can, and can be resumed from there.", "Stop the run"],
  resume: ["Resume this run from its latest checkpoint?", "Resume the run"],
  export: ["Export the weights of the latest checkpoint into the run's folder?", "Export weights"],
  delete: ["Delete this run? Its folder is moved to the bin, where an administrator can take it back.", "Delete the run"],
};
const TAKE_BACK = ["Take this run from the queue? It has not begun.", "Take it back"];
const DONE = { cancel: "The stop was sent.", resume: "The run is queued to resume.", export: "The weights are exported.", delete: "The run is in the bin." };

for (const button of page.querySelectorAll("button[data-act]")) {
  button.addEventListener("click", () => working(button, async () => {
    const act = button.dataset.act;
    const awaited = act === "cancel" && page.dataset.folder !== "yes";
    if (!(await agreed(...(awaited ? TAKE_BACK : QUESTIONS[act])))) return;
    const answer = await call("POST", `${path}/${act}`, {});
    if (act === "delete") { location.assign("/"); return; }
    say(plain(answer?.said || DONE[act]));
    refresh();
  }));
}

let timer = 0;
const refresh = () => {
  clearTimeout(timer);
  timer = setTimeout(() => htmx.ajax("GET", `/runs/${encodeURIComponent(id)}/panel`, { target: "#panel", swap: "outerHTML" }), 700);
};

const plotOf = (name, curve) => {
  if (!plots.has(name)) {
    const plot = new Plot(name, [{ label: "", at: 0, ...curve }], { fromZero: FROM_ZERO.test(name) });
    plots.set(name, plot);
    holder.append(plot.place);
    if (drawn) choose();
  }
  return plots.get(name);
};

// Loss and speed come first; the rest is alphabetical.
const rank = (name) => (/loss/.test(name) ? 0 : /throughput|tokens_per_second|samples_per_second/.test(name) ? 1 : 2);
const filter = document.getElementById("curve-filter");
const all = document.getElementById("all-curves");
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

const curves = async () => {
  const answer = await call("GET", `${path}/metrics`);
  const names = Object.keys(answer.curves).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  for (const name of names) plotOf(name, answer.curves[name]);
  drawn = true;
  choose();
  document.getElementById("no-curves").hidden = names.length > 0;
  return answer.offset;
};

const log = new Log(id, document.getElementById("log"));
const state = () => page.querySelector('[data-cell="state"]').textContent;

const hear = ({ row, points, rewound, again }) => {
  if (again) { location.reload(); return; }
  if (rewound !== undefined && rewound !== null) for (const plot of plots.values()) plot.rewind(rewound);
  const before = state();
  if (row) fillIn(page, row);
  if (before !== state()) refresh();
  if (row && page.dataset.folder !== "yes" && !AWAITED.has(row.state)) { location.reload(); return; }
  for (const [name, found] of Object.entries(points ?? {})) {
    document.getElementById("no-curves").hidden = true;
    plotOf(name, { steps: [], values: [] }).add(0, found);
  }
};

document.getElementById("against")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const other = new FormData(event.target).get("other").trim();
  const place = document.getElementById("differences");
  if (!other) { place.replaceChildren(); return; }
  working(event.submitter ?? event.target.querySelector("button"), async () => {
    const { differences } = await call("GET", `${path}/config?against=${encodeURIComponent(other)}`);
    const head = element("tr", {}, ...["key", "this run", "the other"].map((text) => element("th", { text, scope: "col" })));
    const lines = differences.map(({ key, value, other: its }) =>
      element("tr", {}, ...[key, value, its].map((text) => element("td", { text: plain(text === null ? "–" : String(text)), class: "any" }))));
    place.replaceChildren(lines.length
      ? element("div", { class: "wide" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines)))
      : element("p", { text: "Both have the same configuration." }));
  });
});

// The stream goes on where the curves end. Before the run has a folder there is nothing to draw.
if (page.dataset.folder === "yes") {
  const from = await curves();
  subscribe(`run:${id}@${from}`, hear);
  if (log.rank.value !== "") await log.open();
} else {
  subscribe(`run:${id}`, hear);
}
