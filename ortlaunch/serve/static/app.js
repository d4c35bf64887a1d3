// What every page has: leaving, and times in the reader's zone. A page's own module is a script tag of its own: the
// load event waits for that, and not for an import made by code, before which people could tick boxes that nobody saw.
import { call, working } from "./api.js";

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
