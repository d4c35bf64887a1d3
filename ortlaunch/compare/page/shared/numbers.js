// Numbers as the page of `compare` and the pages of the service show them.
export const number = (value) => {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0 || (size >= 0.001 && size < 1000)) return String(Number(value.toPrecision(4)));
  return size >= 1000 && size < 1e9 ? Math.round(value).toLocaleString("en-US") : value.toExponential(2);
};

// The numbers of an axis: as many digits as its step has, so that no two are written alike.
export const ticks = (values, step) => {
  const most = Math.max(...values.map(Math.abs));
  if (most >= 1e9 || (most > 0 && most < 0.001)) {
    const digits = Math.min(9, Math.max(0, Math.ceil(Math.log10(most / step))));
    return values.map((value) => (value === 0 ? "0" : value.toExponential(digits)));
  }
  let digits = 0;
  while (digits < 12 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1;
  return values.map((value) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
};
