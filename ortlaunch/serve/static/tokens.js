// Tokens for programs: shown once when they are made.
import { agreed, call, say, working } from "./api.js";

const refresh = () => htmx.ajax("GET", "/tokens", { target: "#tokens", swap: "outerHTML" });
const shown = document.getElementById("token");

document.getElementById("new-token").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  working(form.querySelector("button"), async () => {
    const { name, role, days } = Object.fromEntries(new FormData(form));
    const answer = await call("POST", "/api/tokens", { name, role, days: Number(days) });
    shown.hidden = false;
    shown.querySelector(".secret").textContent = answer.secret;
    form.reset();
    await refresh();
  });
});
document.getElementById("password").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  working(form.querySelector("button"), async () => {
    const given = new FormData(form);
    await call("POST", "/api/session/password", { old: given.get("old"), new: given.get("new") });
    form.reset();
    say("The password is changed.");
    await refresh();
  });
});
document.getElementById("others").addEventListener("click", (event) => {
  working(event.target, async () => {
    const { sessions } = await call("DELETE", "/api/session/others");
    say(sessions === 1 ? "One other session has ended." : `${sessions} other sessions have ended.`);
  });
});
document.body.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-revoke]");
  if (!button) return;
  working(button, async () => {
    if (!(await agreed(`Revoke ${button.dataset.name}? Programs that use it are refused within 5 seconds.`, "Revoke"))) return;
    await call("DELETE", `/api/tokens/${button.dataset.revoke}`);
    await refresh();
  });
});
