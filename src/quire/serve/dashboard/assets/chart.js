// Line charts of the last minutes, drawn on a canvas.

import { h, text } from "./dom.js";
import { resolved } from "./palette.js";

const WINDOW_S = 180;
const HEIGHT = 132;
export const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const SIDE = 58, BOTTOM = 20, TOP = 8, RIGHT = 8;

/** Fit a canvas to its width on the page and to the pixels of the screen. */
export function fit(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height, scale };
}

/** A round number at or above a value: 1, 2, 2.5 or 5 times a power of ten (or of two). */
export function ceiling(value, binary = false) {
  if (value <= 0) return 1;
  const base = binary ? 2 : 10;
  const power = base ** Math.floor(Math.log(value) / Math.log(base));
  const steps = binary ? [1, 2] : [1, 2, 2.5, 5, 10];
  return power * steps.find((step) => step * power >= value * 0.999);
}

/** A chart of one or two lines over time. */
export class TimeChart {
  /**
   * @param title heading of the chart
   * @param lines [{name, color, dash}]
   * @param options format of values; binary: ticks are powers of two; integer: ticks are whole;
   *   duration: ticks above a minute are whole minutes or simple fractions
   */
  constructor(title, lines, { format, binary = false, integer = false, duration = false } = {}) {
    this.lines = lines;
    this.format = format;
    this.binary = binary;
    this.integer = integer;
    this.duration = duration;
    this.most = null; // top of the vertical axis; null: the largest value
    this.points = [];
    this.value = h("span", { class: "chart-value" });
    this.canvas = h("canvas", { role: "img" });
    this.title = title;
    const keys = lines.map((line) => h("span", { class: "key" },
      h("span", { class: line.dash ? "line dashed" : "line", css: { borderColor: line.color } }), line.name));
    this.node = h("figure", { class: "chart card" },
      h("figcaption", {}, h("span", { class: "chart-title" }, title), this.value),
      this.canvas, lines.length > 1 ? h("div", { class: "keys" }, keys) : null);
  }

  /** Add the values of one time; null: no value. */
  add(timeS, values) {
    const last = this.points.at(-1);
    if (last && last.timeS >= timeS) return;
    this.points.push({ timeS, values });
    while (this.points[0].timeS < timeS - WINDOW_S) this.points.shift();
    const now = values.map((value) => (value === null ? "–" : this.format(value)));
    text(this.value, now.join(" / "));
    const parts = this.lines.map((line, i) => `${line.name} ${now[i]}`);
    this.canvas.setAttribute("aria-label", `${this.title} in the last 3 minutes; now: ${parts.join(", ")}`);
  }

  draw() {
    if (!this.canvas.isConnected || !this.canvas.clientWidth) return;
    const { context: c, width, height } = fit(this.canvas, HEIGHT);
    const last = this.points.at(-1);
    const most = Math.max(0, ...this.points.flatMap((p) => p.values.map((v) => v ?? 0)));
    const unit = this.duration && most > 50 ? 60 : 1;
    let top = this.most ?? unit * ceiling(most / unit, this.binary);
    if (this.integer) top = Math.max(4, Math.ceil(top / 4) * 4);
    c.font = FONT;
    const labels = [0, 0.5, 1].map((part) => (part ? this.format(top * part) : "0"));
    const left = Math.max(SIDE, 12 + Math.ceil(Math.max(...labels.map((label) => c.measureText(label).width))));
    const x = (timeS) => width - RIGHT - ((last.timeS - timeS) / WINDOW_S) * (width - left - RIGHT);
    const y = (value) => height - BOTTOM - (value / top) * (height - BOTTOM - TOP);
    this.#axes(c, width, height, left, labels, (i) => y((top * i) / 2));
    if (!last) return;
    this.lines.forEach((line, i) => {
      c.strokeStyle = resolved(line.color.replace(/^var\((.*)\)$/, "$1"));
      c.lineWidth = 1.75;
      c.lineJoin = "round";
      c.setLineDash(line.dash ? [5, 4] : []);
      c.beginPath();
      let open = false;
      for (const point of this.points) {
        const value = point.values[i];
        if (value === null) { open = false; continue; }
        if (open) c.lineTo(x(point.timeS), y(value));
        else c.moveTo(x(point.timeS), y(value));
        open = true;
      }
      c.stroke();
    });
    c.setLineDash([]);
  }

  #axes(c, width, height, left, labels, y) {
    c.textBaseline = "middle";
    c.textAlign = "right";
    labels.forEach((label, i) => {
      const at = Math.round(y(i)) + 0.5;
      c.strokeStyle = resolved("--line");
      c.lineWidth = 1;
      c.beginPath();
      c.moveTo(left, at);
      c.lineTo(width - RIGHT, at);
      c.stroke();
      c.fillStyle = resolved("--muted");
      c.fillText(label, left - 8, at);
    });
    c.textBaseline = "alphabetic";
    for (const [minutes, align] of [[3, "left"], [2, "center"], [1, "center"], [0, "right"]]) {
      c.textAlign = align;
      const at = left + (1 - (minutes * 60) / WINDOW_S) * (width - left - RIGHT);
      c.fillText(minutes ? `−${minutes} min` : "now", at, height - 4);
    }
  }
}
