// The list: boxes that stay ticked from page to page, and rows that follow the stream.
import { ApiError, agreed, call, say, working } from "./api.js";
import { fillIn } from "./row.js";
import { subscribe } from "./stream.js";

const KEPT = "compared";
const FRESH_AFTER = 10000;

const ticked = () => new Set(JSON.parse(sessionStorage.getItem(KEPT) ?? "[]"));
const keep = (ids) => sessionStorage.setItem(KEPT, JSON.stringify([...ids]));

const tray = document.getElementById("tray");
const AT_MOST = Number(tray.dataset.most);
const show = () => {
  const ids = ticked();
  for (const box of document.querySelectorAll("#runs input[name=compared]")) {
    box.checked = ids.has(box.value);
    box.disabled = !box.checked && ids.size >= AT_MOST;
  }
  tray.hidden = ids.size === 0;
  tray.querySelector("output").textContent = `${ids.size} ticked${ids.size >= AT_MOST ? " (no more than these)" : ""}`;
  const go = document.getElementById("compare");
  go.setAttribute("aria-disabled", String(ids.size < 2));
  go.href = ids.size < 2 ? "#tray" : `/compare?ids=${[...ids].map(encodeURIComponent).join(",")}`;
};

// On the document: filters and pages replace the list.
document.addEventListener("change", (event) => {
  if (event.target.name !== "compared") return;
  const ids = ticked();
  if (event.target.checked) ids.add(event.target.value);
  else ids.delete(event.target.value);
  keep(ids);
  show();
});
// One request for each run: those that are not one's own, or are over, are counted.
const WORDS = { cancel: ["Stop", "stopped"], delete: ["Delete", "moved to the bin"] };
export const all = (button, act, ids) => working(button, async () => {
  const [name, done] = WORDS[act];
  if (!(await agreed(`${name} ${ids.length} run${ids.length === 1 ? "" : "s"}?`, name))) return;
  const refused = [];
  for (const id of ids) {
    try { await call("POST", `/api/runs/${encodeURIComponent(id)}/${act}`, {}); } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      refused.push(error.message);
    }
  }
  say([`${ids.length - refused.length} of ${ids.length} ${done}.`, ...new Set(refused)].join("\n"), refused.length > 0);
  if (act === "delete") keep(new Set());
  renew();
});
for (const button of tray.querySelectorAll("[data-all]")) button.addEventListener("click", () => all(button, button.dataset.all, [...ticked()]));
document.getElementById("untick").addEventListener("click", () => { keep(new Set()); show(); });
document.body.addEventListener("htmx:afterSwap", show);
// Boxes that were ticked before this script was there count too.
keep(new Set([...ticked(), ...[...document.querySelectorAll("#runs input[name=compared]:checked")].map((box) => box.value)]));
show();

// Rows that are shown are written in place. A run that is not shown, or one that changes its place by its state, needs
// the list anew: at most once in ten seconds and only while somebody can see it.
let fresh = Date.now();
let timer = 0;
const renew = () => {
  fresh = Date.now();
  return htmx.ajax("GET", location.pathname + location.search, { target: "#runs", swap: "outerHTML" });
};
const again = () => {
  if (timer) return;
  timer = setTimeout(() => {
    timer = 0;
    if (document.hidden || document.querySelector("#runs :focus")) { again(); return; }
    renew();
  }, Math.max(300, FRESH_AFTER - (Date.now() - fresh)));
};

// The states of runs that are not shown: one that only goes on changes no page.
const unseen = new Map();

subscribe("list", ({ rows, gone, again: missed }) => {
  if (missed || gone?.length) again();
  const shown = new Map([...document.querySelectorAll("#runs tr[data-id]")].map((tr) => [tr.dataset.id, tr]));
  for (const row of rows) {
    const tr = shown.get(row.id);
    const before = tr ? tr.querySelector('[data-cell="state"]').textContent : unseen.get(row.id);
    if (before !== row.state) again();
    unseen.set(row.id, row.state);
    if (tr) fillIn(tr, row);
  }
});

// The columns are this browser's choice, until a link names others.
const columns = document.querySelector("details.columns");
if (columns) {
  const boxes = [...columns.querySelectorAll("input")];
  columns.addEventListener("change", () => localStorage.setItem("columns", JSON.stringify(boxes.filter((one) => one.checked).map((one) => one.value))));
  const chosen = new Set(JSON.parse(localStorage.getItem("columns") ?? "[]"));
  const missing = boxes.filter((one) => chosen.has(one.value) && !one.checked);
  if (missing.length && !boxes.some((one) => one.checked)) {
    for (const one of missing) one.checked = true;
    columns.dispatchEvent(new Event("change", { bubbles: true }));
  }
}
