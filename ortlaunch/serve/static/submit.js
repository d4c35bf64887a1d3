// A new run: the choice of a ready job, and the form once there is one.
import "./fields.js";

document.getElementById("job").addEventListener("change", (event) => {
  location.assign(event.target.value ? `/submit?job=${encodeURIComponent(event.target.value)}` : "/submit");
});
