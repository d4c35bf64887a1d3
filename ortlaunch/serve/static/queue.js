// The queue follows the stream of the list; administrators' buttons write through the API.
import { agreed, call, say, working } from "./api.js";
import { subscribe } from "./stream.js";

const refresh = () => htmx.ajax("GET", "/queue", { target: "#queue", swap: "outerHTML" });
const FRESH_AFTER = 3000;
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

subscribe("list", soon);
