// Brings a run's figures on a page up to date; list and run page mark them with data-cell.
import { count, duration, number, plain } from "./format.js";

export const stateClass = (state) => `state state-${state.replace(/[^a-z]/g, "")}`;

export const fillIn = (place, row) => {
  const write = (name, text) => {
    for (const cell of place.querySelectorAll(`[data-cell="${name}"]`)) if (cell.textContent !== text) cell.textContent = text;
  };
  for (const cell of place.querySelectorAll('[data-cell="state"]')) {
    cell.textContent = row.state;
    cell.className = stateClass(row.state);
  }
  write("reason", [row.position ? `place ${row.position}` : "", plain(row.reason ?? "")].filter(Boolean).join(": "));
  write("step", row.steps ? `${count(row.step ?? 0)} / ${count(row.steps)}` : count(row.step));
  write("loss", row.diverged ? "NaN" : number(row.loss));
  write("rate", number(row.rate));
  write("unit", row.rate === null ? "" : row.rate_unit);
  write("rate-name", row.rate_unit || "Rate");
  write("left", row.seconds_left === null ? "" : `${duration(row.seconds_left)} left`);
  for (const bar of place.querySelectorAll("progress")) {
    bar.max = row.steps || 1;
    bar.value = row.step ?? 0;
  }
};
