// Logging in, and choosing a password by a one-time link.
import { ApiError, call } from "./api.js";

const problem = document.getElementById("problem");
// Where to go after: a path of this server alone.
const next = () => {
  const wanted = new URLSearchParams(location.search).get("next") ?? "/";
  const url = new URL(wanted, location.origin);
  return wanted.startsWith("/") && url.origin === location.origin ? url.href : "/";
};

const form = document.querySelector("form");
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = Object.fromEntries(new FormData(form));
  problem.textContent = "";
  if (form.id === "welcome" && given.password !== given.again) {
    problem.textContent = "The two passwords differ.";
    form.elements.again.focus();
    return;
  }
  delete given.again;
  const button = form.querySelector("button");
  button.disabled = true;
  try {
    if (form.id === "welcome") await call("POST", "/api/link", given);
    else await call("POST", "/api/session", given);
    location.assign(form.id === "welcome" ? "/" : next());
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    problem.textContent = error.message;
    button.disabled = false;
    form.elements.password.focus();
  }
});
// Before this script is there, sending the form would lead nowhere.
form.querySelector("button").disabled = false;
// The link is used once and must not stay in the address bar or the history.
if (form.id === "welcome") history.replaceState(null, "", "/login");
