// The queue follows the stream of the list; administrators' buttons write through the API.
import { agreed, call, say, working } from "./api.js";
import { subscribe } from "./stream.js";

const FRESH_AFTER = 3000;
const OLD_AFTER = 30000;
let fresh = Date.now();
const refresh = () => {
  fresh = Date.now();
  return htmx.ajax("GET", "/queue", { target: "#queue", swap: "outerHTML" });
};
let timer = 0;
const soon = () => {
  timer ||= setTimeout(() => {
    timer = 0;
    if (document.hidden || document.querySelector("#queue :focus")) { soon(); return; }
    refresh();
  }, FRESH_AFTER);
};

document.body.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-queue]");
  if (!button) return;
  working(button, async () => {
    const act = button.dataset.queue;
    if (act === "drain" && !(await agreed("Drain the queue? Running runs go on to their end; nothing new starts until you continue.", "Drain"))) return;
    await call("POST", `/api/queue/${act}`, {});
    await refresh();
  });
});
document.body.addEventListener("submit", (event) => {
  const limits = event.target.closest("form[data-limits]");
  if (limits) {
    event.preventDefault();
    working(limits.querySelector("button"), async () => {
      const given = Object.fromEntries([...new FormData(limits)].map(([name, value]) => [name, value === "" ? null : Number(value)]));
      await call("PUT", `/api/limits/${limits.dataset.limits}`, given);
      say("The limits are set: they hold for runs that are sent from now on.");
    });
    return;
  }
  const form = event.target.closest("form[data-priority]");
  if (!form) return;
  event.preventDefault();
  working(form.querySelector("button"), async () => {
    const priority = Number(new FormData(form).get("priority"));
    await call("POST", `/api/queue/${encodeURIComponent(form.dataset.priority)}/priority`, { priority });
    say("The priority is set.");
    await refresh();
  });
});

// A run that only goes on changes nothing in the queue; the times and shares are shown anew now and then.
const places = new Map();
subscribe("list", ({ rows, gone, again: missed }) => {
  let isOld = missed || gone?.length > 0 || Date.now() - fresh > OLD_AFTER;
  for (const { id, state, position, reason } of rows) {
    const now = JSON.stringify([state, position, reason]);
    isOld ||= places.get(id) !== now;
    places.set(id, now);
  }
  if (isOld) soon();
});
