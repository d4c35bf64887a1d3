// The form of a new run: it sends what differs from the default, shows the dry run, and then sends the same again.
import { ApiError, call, say, working } from "./api.js";
import { element, plain } from "./format.js";

const form = document.getElementById("submit");
const checked = document.getElementById("checked");
const send = document.getElementById("send");
const check = document.getElementById("check");
const fields = [...form.querySelectorAll(".field")];
// Groups that were chosen before this page was made: they are its base, and must be sent all the same.
const kept = new Set(JSON.parse(form.dataset.kept));
let ready = "";
let idempotency = "";

const inputOf = (field) => field.querySelector("input, select, textarea");
// What the key has by the ready job and the chosen groups, and what it has by itself.
const base = (field) => JSON.parse(field.dataset.base);
const byDefault = (field) => JSON.parse(field.dataset.default);
const put = (field, value) => {
  const input = inputOf(field);
  if (input.type === "checkbox") input.checked = Boolean(value);
  else input.value = value === null || value === undefined ? "" : String(value);
};
const valueOf = (field) => {
  const input = inputOf(field);
  if (input.type === "checkbox") return input.checked;
  const text = input.value;
  if (field.dataset.type === "flag") return text === "" ? null : text === "true";
  if (field.dataset.type === "integer" || field.dataset.type === "number") {
    if (text.trim() === "") return null;
    const found = Number(text);
    return Number.isFinite(found) ? found : text;
  }
  return text === "" && base(field) === null ? null : text;
};
const isSent = (field) => !inputOf(field).disabled && valueOf(field) !== base(field);

const mark = (field) => {
  field.classList.toggle("changed", valueOf(field) !== byDefault(field));
  field.querySelector(".reset").hidden = !isSent(field);
};

// Values are of their field's type; a key without one takes numbers, true, false, null or texts.
const typed = (key, text) => {
  const kind = fields.find((one) => one.dataset.key === key)?.dataset.type;
  if (kind === "text" || kind === "choice") return text;
  try { return JSON.parse(text); } catch { return /^[+-]?\d*\.?\d+(e[+-]?\d+)?$/i.test(text) ? Number(text) : text; }
};
const axes = () => Object.fromEntries(document.getElementById("axes").value.split("\n").filter((line) => line.trim())
  .map((line) => line.split(/=(.*)/s))
  .map(([key, values]) => [key.trim(), (values ?? "").split(",").map((one) => one.trim()).filter(Boolean).map((one) => typed(key.trim(), one))]));
const LINES = ["script", "axes"];
JSON.parse(sessionStorage.getItem("lines") ?? "[]").forEach((text, at) => { document.getElementById(LINES[at]).value = text; });
sessionStorage.removeItem("lines");
const countRuns = () => {
  const sizes = Object.values(axes()).map((values) => values.length);
  const runs = sizes.reduce((all, one) => all * one, 1);
  const said = document.getElementById("axes-said");
  const tooMany = runs > Number(said.dataset.most) ? `: at most ${said.dataset.most} are taken` : "";
  if (sizes.length) said.textContent = `${sizes.join(" × ")} = ${runs} run${runs === 1 ? "" : "s"}${tooMany}`;
};
document.getElementById("axes").addEventListener("input", countRuns);
countRuns();

const request = () => {
  const keys = {};
  for (const field of fields) if (isSent(field) || kept.has(field.dataset.key)) keys[field.dataset.key] = valueOf(field);
  const body = { keys, axes: axes() };
  const script = document.getElementById("script").value.trim();
  if (script) body.script = script;
  const project = document.getElementById("project");
  if (project) body.project = project.value;
  if (form.dataset.job) body.job = form.dataset.job;
  const limit = form.elements.minutes.value.trim();
  if (limit !== "") body.minutes = Number.isFinite(Number(limit)) ? Number(limit) : limit;
  return body;
};

const clear = () => {
  for (const field of fields) {
    field.classList.remove("refused");
    inputOf(field).removeAttribute("aria-invalid");
    field.querySelector(".problem").textContent = "";
  }
  document.getElementById("problems").replaceChildren();
  for (const one of ["minutes", "script"]) document.getElementById(`${one}-problem`).textContent = "";
};

const refuse = (problems) => {
  const rest = [];
  let first = null;
  for (const { key, message } of problems) {
    if (key === "minutes" || key === "script") { document.getElementById(`${key}-problem`).textContent = plain(message); continue; }
    const field = fields.find((one) => one.dataset.key === key);
    if (!field) { rest.push(key ? `${key}: ${message}` : message); continue; }
    field.classList.add("refused");
    field.hidden = false;
    field.closest("details").open = true;
    inputOf(field).setAttribute("aria-invalid", "true");
    field.querySelector(".problem").textContent = plain(message);
    first ??= field;
  }
  if (rest.length) {
    const list = element("ul", {}, ...rest.map((text) => element("li", { text: plain(text) })));
    document.getElementById("problems").append(element("div", { class: "problems", role: "alert" }, element("strong", { text: "This cannot run:" }), list));
  }
  if (first) {
    // Its message stands below it, and the bar with the button covers the end of the screen.
    first.scrollIntoView({ block: "center" });
    inputOf(first).focus({ preventScroll: true });
  }
  else if (rest.length) document.getElementById("problems").scrollIntoView({ block: "center" });
};

const forget = () => {
  ready = "";
  send.disabled = true;
  checked.hidden = true;
};

form.addEventListener("input", (event) => {
  const field = event.target.closest(".field");
  if (field) mark(field);
  if (JSON.stringify(request()) !== ready) forget();
});
// Another model, trainer or data source has other keys: the page is made anew with it.
form.addEventListener("change", (event) => {
  const field = event.target.closest(".field");
  if (!field?.dataset.group || field.dataset.group !== "choices") return;
  const query = new URLSearchParams(location.search);
  query.set(field.dataset.key, valueOf(field));
  sessionStorage.setItem("draft", JSON.stringify(request().keys));
  sessionStorage.setItem("lines", JSON.stringify(LINES.map((one) => document.getElementById(one).value)));
  location.assign(`/submit?${query}`);
});
form.addEventListener("click", (event) => {
  if (!event.target.matches(".reset")) return;
  const field = event.target.closest(".field");
  put(field, base(field));
  mark(field);
  forget();
  inputOf(field).focus();
});

const tried = async (work) => {
  clear();
  try { await work(); } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.problems.length) refuse(error.problems);
    else say(error.message, true);
  }
};

form.addEventListener("submit", (event) => {
  event.preventDefault();
  working(check, () => tried(async () => {
    check.textContent = "Checking …";
    try {
      const body = request();
      const answer = await call("POST", "/api/runs/check", body);
      document.getElementById("plan").textContent = plain(answer.plan);
      const needs = answer.needs.cores ? `, ${answer.needs.cores} cores and ${(answer.needs.memory / 2 ** 30).toFixed(1)} GiB of memory at least` : "";
      const none = answer.needs.cores ? "no GPU" : "a job of the scheduler";
      document.getElementById("cost").textContent = `${answer.runs > 1 ? `${answer.runs} runs, each ` : ""}${answer.slots ? `${answer.slots} slot${answer.slots === 1 ? "" : "s"}` : none}${needs}${answer.minutes ? `, ${answer.minutes} minutes at most` : ""}`;
      checked.hidden = false;
      ready = JSON.stringify(body);
      idempotency = crypto.randomUUID();
      send.textContent = answer.runs > 1 ? `Send these ${answer.runs} runs` : "Send this run";
      send.disabled = false;
      send.focus({ preventScroll: true });
      checked.scrollIntoView({ block: "nearest" });
    } finally { check.textContent = "Check: show the dry run"; }
  }));
});

// The same key until the server has answered: a request that is sent twice makes one run.
send.addEventListener("click", () => working(send, () => tried(async () => {
  const answer = await call("POST", "/api/runs", JSON.parse(ready), { "Idempotency-Key": idempotency });
  sessionStorage.removeItem("draft");
  location.assign(answer.sweep ? `/sweeps/${encodeURIComponent(answer.sweep)}` : `/runs/${encodeURIComponent(answer.id)}`);
})));

const filter = document.getElementById("field-filter");
const sift = () => {
  const word = filter.value.trim().toLowerCase();
  for (const field of fields) field.hidden = !(field.dataset.key + field.dataset.meaning).toLowerCase().includes(word);
  for (const group of form.querySelectorAll("details")) {
    const any = [...group.querySelectorAll(".field")].some((field) => !field.hidden);
    group.hidden = !any;
    if (word && any) group.open = true;
  }
};
filter.addEventListener("input", sift);

// What was filled in before another group was chosen, or what the run had that is made again.
const draft = { ...JSON.parse(form.dataset.keys), ...JSON.parse(sessionStorage.getItem("draft") ?? "{}") };
sessionStorage.removeItem("draft");
for (const field of fields) {
  const key = field.dataset.key;
  if (key in draft && field.dataset.group !== "choices" && !inputOf(field).disabled) put(field, draft[key]);
  mark(field);
  if (isSent(field)) field.closest("details").open = true;
}
form.dataset.ready = "yes";
