// Every write of the pages goes through here, to the same API that programs use.
import { element } from "./format.js";

export class ApiError extends Error {
  constructor(status, body) {
    super(messageOf(status, body));
    this.status = status;
    this.problems = Array.isArray(body?.problems) ? body.problems : [];
  }
}

const messageOf = (status, body) => {
  if (Array.isArray(body?.problems) && body.problems.length) return body.problems.map((one) => one.message).join("\n");
  if (typeof body?.message === "string") return body.message;
  if (typeof body?.detail === "string") return body.detail;
  if (status === 429) return "Too many requests: wait a moment, then try again.";
  return `The server refused the request (${status}).`;
};

const csrf = () => document.querySelector('meta[name="csrf"]')?.content ?? "";

export const call = async (method, path, body, headers = {}) => {
  const sent = { Accept: "application/json", ...headers };
  if (method !== "GET") sent["X-CSRF-Token"] = csrf();
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers: sent, body: body === undefined ? undefined : JSON.stringify(body), credentials: "same-origin" });
  } catch {
    throw new ApiError(0, { message: "The server does not answer. Nothing is known to have been done: look, then try again." });
  }
  const text = await answer.text();
  let document_ = null;
  try { document_ = text ? JSON.parse(text) : null; } catch { /* an error page of a proxy */ }
  if (answer.status === 401 && !location.pathname.startsWith("/login")) {
    location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
  }
  if (!answer.ok) throw new ApiError(answer.status, document_);
  return document_;
};

// A message for a moment, read aloud by screen readers.
export const say = (text, bad = false) => {
  const place = document.getElementById("said");
  const box = element("div", { text, class: bad ? "bad" : "", role: bad ? "alert" : "status" });
  place.append(box);
  setTimeout(() => box.remove(), bad ? 12000 : 5000);
};

// Asks before what cannot be undone. Resolves to whether the person agreed.
export const agreed = (question, yes) => new Promise((resolve) => {
  const go = element("button", { value: "yes", class: "main", text: yes });
  const stay = element("button", { value: "", text: "Leave it", autofocus: true });
  const form = element("form", { method: "dialog" }, element("p", { text: question }), element("div", { class: "buttons" }, stay, go));
  const box = element("dialog", { "aria-label": yes }, form);
  box.addEventListener("close", () => { resolve(box.returnValue === "yes"); box.remove(); });
  document.body.append(box);
  box.showModal();
});

// Runs a button's work once at a time and says what went wrong.
export const working = async (button, work) => {
  if (button.disabled) return;
  button.disabled = true;
  try { await work(); } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    say(error.message, true);
  } finally { button.disabled = false; }
};
