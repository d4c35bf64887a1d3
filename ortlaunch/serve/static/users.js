// Users, for administrators: a new one gets a one-time link, shown here and nowhere else.
import { agreed, call, say, working } from "./api.js";

const refresh = () => htmx.ajax("GET", "/users", { target: "#users", swap: "outerHTML" });
const shown = document.getElementById("link");
const show = (name, url) => {
  shown.hidden = false;
  shown.querySelector("strong").textContent = name;
  shown.querySelector(".secret").textContent = new URL(url, location.origin).href;
  shown.scrollIntoView({ block: "nearest" });
};

document.getElementById("new-user").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  working(form.querySelector("button"), async () => {
    const given = Object.fromEntries(new FormData(form));
    if (!given.unix_user) delete given.unix_user;
    const answer = await call("POST", "/api/users", given);
    show(answer.user.name, answer.link);
    form.reset();
    await refresh();
  });
});
document.body.addEventListener("change", (event) => {
  const field = event.target;
  const isRole = field.matches("select[data-user]");
  const { unix, projects } = field.dataset;
  if (!isRole && !unix && !projects) return;
  const change = isRole ? { role: field.value } : unix ? { unix_user: field.value } : { projects: field.value.split(",").map((one) => one.trim()).filter(Boolean) };
  working(field, async () => {
    await call("PATCH", `/api/users/${isRole ? field.dataset.user : unix ?? projects}`, change);
    say(isRole ? "The role is changed." : unix ? "The Unix user is changed." : "The projects are changed.");
  }).then(refresh);
});
document.body.addEventListener("submit", (event) => {
  const form = event.target.closest("form[data-project]");
  if (!form) return;
  event.preventDefault();
  const { name, slots } = Object.fromEntries(new FormData(form));
  working(form.querySelector("button"), async () => {
    await call("PUT", `/api/projects/${encodeURIComponent(form.dataset.project || name)}`, { slots: slots ? Number(slots) : null });
    say("The project is set.");
    await refresh();
  });
});
document.body.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-remove]");
  if (button) working(button, async () => { await call("DELETE", `/api/projects/${encodeURIComponent(button.dataset.remove)}`); await refresh(); });
});
document.body.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-act]");
  if (!button) return;
  const { act, user, name } = button.dataset;
  const path = `/api/users/${user}`;
  working(button, async () => {
    if (act === "link") {
      if (!(await agreed(`Make a new link for ${name}? It lets them choose a new password; older links end.`, "Make a link"))) return;
      show(name, (await call("POST", `${path}/link`, {})).link);
    } else {
      const disabled = act === "lock";
      if (disabled && !(await agreed(`Lock ${name} out? Sessions, streams and tokens end within 5 seconds. Runs go on.`, "Lock out"))) return;
      await call("PATCH", path, { disabled });
      await refresh();
    }
  });
});
