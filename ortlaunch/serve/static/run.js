// One run: what can be done with it, and its state.
import { agreed, call, say, working } from "./api.js";
import { plain } from "./format.js";
import { fillIn } from "./row.js";
import { subscribe } from "./stream.js";

const page = document.getElementById("run");
const id = page.dataset.id;
const path = `/api/runs/${encodeURIComponent(id)}`;
const hasFolder = page.dataset.folder === "yes";
const AWAITED = new Set(["waiting", "starting", "refused", "cancelled"]);

const QUESTIONS = {
  cancel: ["Stop this run? It writes a checkpoint first where it can, and can be resumed from there.", "Stop the run"],
  resume: ["Resume this run from its latest checkpoint?", "Resume the run"],
  export: ["Export the weights of the latest checkpoint into the run's folder?", "Export weights"],
  delete: ["Delete this run? Its folder is moved to the bin, where an administrator can take it back.", "Delete the run"],
};
const TAKE_BACK = ["Take this run from the queue? It waits, and does not begin then.", "Take it back"];
const DONE = { cancel: "The stop was sent.", resume: "The run is queued to resume.", delete: "The run is in the bin." };

// The buttons are made anew with each state.
page.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-act]");
  if (!button) return;
  working(button, async () => {
    const act = button.dataset.act;
    if (!(await agreed(...(act === "cancel" && state() === "waiting" ? TAKE_BACK : QUESTIONS[act])))) return;
    const answer = await call("POST", `${path}/${act}`, {});
    if (act === "delete") { location.assign("/"); return; }
    say(plain(act === "export" ? `The weights are in ${answer.folder}, among the files of this page.` : answer?.said || DONE[act]));
    refresh();
    if (act === "export") htmx.ajax("GET", location.pathname, { target: "#place", select: "#place", swap: "outerHTML" });
  });
});

document.getElementById("note")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const { title, tags, note } = Object.fromEntries(new FormData(event.target));
  working(event.target.querySelector("button"), async () => {
    await call("PUT", `${path}/note`, { title, tags: tags.split(","), note });
    say("It is kept.");
  });
});

// What only the panel has, such as goodput and checkpoints, is no older than this while the run goes on.
const PANEL_AGE = 60_000;
let timer = 0;
let renewed = Date.now();
const renew = async () => {
  renewed = Date.now();
  const parts = [...page.querySelectorAll("#panel details[open][data-part]")].map((one) => one.dataset.part);
  const focused = document.activeElement?.closest("#panel [data-act], #panel [data-part]")?.dataset;
  await htmx.ajax("GET", `/runs/${encodeURIComponent(id)}/panel`, { target: "#panel", swap: "outerHTML" });
  for (const part of parts) page.querySelector(`#panel [data-part="${part}"]`)?.setAttribute("open", "");
  if (focused) page.querySelector(focused.act ? `#panel [data-act="${focused.act}"]` : `#panel [data-part="${focused.part}"] summary`)?.focus();
};
const refresh = () => {
  clearTimeout(timer);
  timer = setTimeout(renew, 700);
};

const state = () => page.querySelector('[data-cell="state"]').textContent;
// A button that is at work must stay as it is.
const isAged = () => Date.now() - renewed > PANEL_AGE && !document.hidden && !page.querySelector("#panel button[disabled]");
const showState = (row) => {
  const before = state();
  fillIn(page, row);
  if (before !== state()) refresh();
  else if (isAged()) renew();
};

if (hasFolder) {
  const { follow } = await import("./followed.js");
  await follow(id, path, showState);
} else {
  // A run that has begun has curves and logs, for which this page has no place yet.
  subscribe(`run:${id}`, ({ row }) => {
    if (!row) return;
    if (AWAITED.has(row.state)) showState(row);
    else location.reload();
  });
}
