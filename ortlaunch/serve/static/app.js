// What every page has: leaving, times in the reader's zone, and the page's own module.
import { call, working } from "./api.js";

const PAGES = ["runs", "run", "submit", "queue", "compare", "login", "users", "tokens"];

document.getElementById("leave")?.addEventListener("click", (event) =>
  working(event.currentTarget, async () => {
    await call("DELETE", "/api/session");
    location.assign("/login");
  }));

export const localTimes = (root) => {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    time.textContent = at.toLocaleString("sv-SE", { dateStyle: "short", timeStyle: "short" });
    time.title = at.toString();
  }
};
localTimes(document);
document.body.addEventListener("htmx:load", (event) => localTimes(event.target));
const page = document.body.dataset.page;
if (PAGES.includes(page)) await import(`./${page}.js`);
