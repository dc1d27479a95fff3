// Colours and patterns of owners and states. Hues are distinct with colour blindness, and each
// colour comes with a pattern, so that no two neighbours in a legend look alike in grey.

const HUES = ["#0072b2", "#d55e00", "#009e73", "#b5529b", "#3b93cc", "#a06a00", "#6f5fc4", "#5a7f1e"];
const PATTERNS = ["solid", "stripes", "dots", "cross"];

export const STATES = [
  { name: "Free", color: "--free", pattern: "solid" },
  { name: "Prefix cache", color: "--cache", pattern: "dots" },
  { name: "Exact", color: "#0072b2", pattern: "solid" },
  { name: "Exact, shared", color: "#3b93cc", pattern: "cross" },
  { name: "Tokens evicted", color: "#d55e00", pattern: "stripes" },
  { name: "Quantized", color: "#009e73", pattern: "dots" },
  { name: "Offload staging", color: "#b5529b", pattern: "stripes" },
  { name: "Statistics", color: "#6f5fc4", pattern: "cross" },
];
const [EVICTED, SHARED, , STAGING, , AUXILIARY] = [1, 2, 4, 8, 16, 32];

/** Index in STATES of a page. */
export function stateOf(owner, state, quantized) {
  if (owner < 2) return owner;
  if (state & STAGING) return 6;
  if (state & AUXILIARY) return 7;
  if (state & EVICTED) return 4;
  if (quantized) return 5;
  return state & SHARED ? 3 : 2;
}

const given = new Map();

/** Colour and pattern of a request; the same as long as the page is open. */
export function lookOf(requestId) {
  if (!given.has(requestId)) {
    const number = given.size;
    given.set(requestId, {
      color: HUES[number % HUES.length],
      pattern: PATTERNS[Math.floor(number / HUES.length) % PATTERNS.length],
    });
  }
  return given.get(requestId);
}

/** The value of a colour that may be a variable of the style sheet. */
export function resolved(color) {
  if (!color.startsWith("--")) return color;
  return getComputedStyle(document.documentElement).getPropertyValue(color).trim();
}

const tiles = new Map();

/** Canvas fill of a look; patterns need cells of at least 5 pixels. */
export function fillOf(context, look, scale) {
  const color = resolved(look.color);
  if (look.pattern === "solid") return color;
  const name = `${color} ${look.pattern} ${scale}`;
  if (!tiles.has(name)) tiles.set(name, tile(color, look.pattern, scale));
  return context.createPattern(tiles.get(name), "repeat");
}

function tile(color, pattern, scale) {
  const size = Math.round(6 * scale);
  const canvas = new OffscreenCanvas(size, size), c = canvas.getContext("2d");
  c.fillStyle = color;
  c.fillRect(0, 0, size, size);
  c.fillStyle = c.strokeStyle = "rgb(255 255 255 / 55%)";
  c.lineWidth = scale;
  if (pattern === "dots") c.fillRect(size / 3, size / 3, size / 3, size / 3);
  if (pattern === "stripes" || pattern === "cross") {
    c.beginPath();
    for (const shift of [-size, 0, size]) { c.moveTo(shift, size); c.lineTo(shift + size, 0); }
    if (pattern === "cross") for (const shift of [-size, 0, size]) {
      c.moveTo(shift, 0); c.lineTo(shift + size, size);
    }
    c.stroke();
  }
  return canvas;
}

/** A class list for a swatch with a pattern, and its colour. */
export const swatch = (look) => ({
  class: `swatch pattern-${look.pattern}`,
  css: { backgroundColor: look.color.startsWith("--") ? `var(${look.color})` : look.color },
});
