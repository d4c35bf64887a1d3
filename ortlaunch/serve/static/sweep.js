// A sweep's results against each of its axes, and the end of those runs that are not over.
import { Plot } from "./plot.js";
import { all } from "./runs.js";

const holder = document.getElementById("plots");
const result = document.getElementById("result");

// An axis of numbers is drawn as it is, by its logarithm where it spans more than a decade; one of names in their order.
const scaled = (values) => {
  const numbers = values.map(Number);
  if (numbers.some((one) => !Number.isFinite(one))) {
    const names = [...new Set(values)];
    return { x: values.map((one) => names.indexOf(one)), names };
  }
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  return { x: numbers, logX: low > 0 && high >= 10 * low };
};

const draw = () => {
  const { axes, runs } = JSON.parse(document.getElementById("runs").dataset.swept);
  const ended = runs.filter((run) => typeof run[result.value] === "number");
  document.getElementById("no-results").hidden = ended.length > 0;
  holder.replaceChildren(...axes.map((axis) => {
    const { x, ...options } = scaled(ended.map((run) => run[axis]));
    // Runs that differ in this axis alone have one colour.
    const others = ended.map((run) => JSON.stringify(axes.filter((one) => one !== axis).map((one) => run[one])));
    const groups = [...new Set(others)];
    const curves = ended.map((run, at) => ({
      label: axes.map((one) => `${one}=${run[one]}`).join(" "), at, group: groups.indexOf(others[at]), x: [x[at]], values: [run[result.value]],
    }));
    return curves.length ? new Plot(`${result.value} by ${axis}`, curves, { unit: axis, ...options }).place : "";
  }));
};
result.addEventListener("change", draw);
document.body.addEventListener("htmx:afterSwap", draw);
draw();
holder.dataset.ready = "yes";

const rest = document.getElementById("stop-rest");
rest?.addEventListener("click", () => all(rest, "cancel", rest.dataset.ids.split(",")));
