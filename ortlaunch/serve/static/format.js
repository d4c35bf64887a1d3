// Numbers and times as the pages show them; the server's filters in render.py write the same.
export { element } from "./element.js";
export { number, ticks } from "./numbers.js";

// A number of things, with all its digits.
export const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));

export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
};

export const bytes = (size) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let [value, unit] = [size, 0];
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit === 0 ? value : value.toFixed(1)} ${units[unit]}`;
};

// A terminal's colours go; what would turn the text's direction or move a cursor is shown as its code.
const COLOURS = /\u001b\[[0-9;]*[A-Za-z]/g;
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
export const plain = (text) =>
  text.replace(COLOURS, "").replace(UNSEEN, (char) => `<${char.codePointAt(0).toString(16).padStart(4, "0")}>`);
// As a terminal leaves a progress bar: what stands after the last carriage return.
export const logLine = (text) => plain(text.replace(/\r+$/, "").split("\r").at(-1));
