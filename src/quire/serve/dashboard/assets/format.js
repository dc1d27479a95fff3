// Numbers with units.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const grouped = new Intl.NumberFormat("en-US");

/** Bytes with a binary unit: 1.5 MiB. */
export function bytes(value) {
  let unit = 0, number = value;
  while (Math.abs(number) >= 1024 && unit < UNITS.length - 1) { number /= 1024; unit += 1; }
  const digits = unit === 0 || number >= 100 ? 0 : number >= 10 ? 1 : 2;
  return `${Number(number.toFixed(digits))} ${UNITS[unit]}`;
}

/** A whole number with groups of three digits. */
export const count = (value) => grouped.format(Math.round(value));

/** A number with its noun: 1 page, 2 pages. */
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** An ordinal number: 1st, 2nd, 3rd, 4th, 11th. */
export function ordinal(value) {
  const last = value % 100 > 10 && value % 100 < 14 ? 0 : value % 10;
  return `${count(value)}${["th", "st", "nd", "rd"][last] ?? "th"}`;
}

/** Seconds with a fitting unit: 850 µs, 12 ms, 3.2 s, 4 min 10 s. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${Number((value * 1000).toFixed(value < 0.01 ? 1 : 0))} ms`;
  if (value < 10) return `${Number(value.toFixed(2))} s`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  const [size, large, small] = whole < 3600 ? [60, "min", "s"] : [3600, "h", "min"];
  const rest = Math.floor((whole % size) / (size / 60));
  return `${Math.floor(whole / size)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

/** A rate with at most three digits. */
export function rate(value) {
  return value >= 100 ? count(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** A short form of a request id: its first and last characters. */
export function shortId(id) {
  const name = id.replace(/^(cmpl|chatcmpl|resp|msg)-/, "");
  return name.length <= 14 ? name : `${name.slice(0, 8)}…${name.slice(-3)}`;
}
