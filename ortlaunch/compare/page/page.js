// Draws the data that the page contains; it loads nothing else.
import { Plot, legend } from "./plot.js";

const data = JSON.parse(document.getElementById("curves").textContent);

// A pause gets an x value without a y value, so that no line crosses it.
const timed = (curve) => {
  const [places, values] = [[], []];
  curve.seconds.forEach((second, at) => {
    if (curve.pauses.includes(at)) {
      places.push((curve.seconds[at - 1] + second) / 2);
      values.push(null);
    }
    places.push(second);
    values.push(curve.values[at]);
  });
  return [places, values];
};

// All curves of a plot share their x values. A thousand runs with their own times would need more of them than a
// browser can hold, so points are moved to the nearest of two thousand x values.
const tables = (curves, unit) => {
  const found = curves.map((curve) => (unit === "step" ? [curve.steps, curve.values] : timed(curve)));
  const places = new Set(found.flatMap(([at]) => at));
  if (places.size * curves.length <= 4e6) return found;
  let [low, high] = [Infinity, -Infinity];
  places.forEach((place) => { low = Math.min(low, place); high = Math.max(high, place); });
  const width = (high - low) / 2000;
  return found.map(([at, values]) => {
    const moved = new Map(at.map((place, n) => [low + Math.round((place - low) / width) * width, values[n]]));
    return [[...moved.keys()], [...moved.values()]];
  });
};

const plots = data.plots.flatMap(({ title, fromZero, curves }) => ["step", "second"].map((unit) => {
  const found = tables(curves, unit).map(([x, values], n) => ({ ...data.runs[curves[n].run], at: curves[n].run, x, values }));
  return new Plot(`${title} over ${unit === "step" ? "steps" : "time"}`, found, { fromZero, unit });
}));
document.getElementById("plots").append(...plots.map(({ place }) => place));
legend(document.getElementById("legend"), data.runs, (at, shown) => plots.forEach((plot) => plot.hide(at, !shown)));
