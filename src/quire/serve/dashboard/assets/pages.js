// The page map: the pages of the arena by address, coloured by owner or by state. The area of a
// page is in proportion to its bytes.

import { read } from "./api.js";
import { fit } from "./chart.js";
import { h, keyed, text } from "./dom.js";
import { bytes, count, ordinal, plural, shortId } from "./format.js";
import { fillOf, lookOf, STATES, stateOf, swatch } from "./palette.js";

const MOST_HEIGHT = 460, LARGEST_CELL = 16, SMALLEST_CELL = 3;
const PATTERN_FROM = 5; // pixels of a cell
const MOST_ROWS = 40;
const BITS = [[1, "tokens evicted"], [2, "shared"], [4, "in the prefix cache"],
  [8, "offload staging"], [32, "statistics"]];

export class Pages {
  id = "pages";
  title = "Page map";

  constructor(app) {
    this.app = app;
    this.mode = "owner";
    this.body = null;
    this.cells = null;
    this.cursor = -1;
  }

  build() {
    const radio = (value, label) => {
      const input = h("input", { type: "radio", name: "page-color", value, checked: value === this.mode,
        onchange: () => { this.mode = value; this.legends(); this.draw(); } });
      return h("label", { class: "choice" }, input, label);
    };
    this.canvas = h("canvas", { tabindex: "0", role: "img", class: "map", "aria-describedby": "map-help" });
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.cursor = -1; this.draw(); });
    this.summary = h("p", { class: "facts" });
    this.detail = h("output", { class: "map-detail", "aria-live": "polite" });
    this.legend = h("tbody");
    this.head = h("tr");
    this.classes = h("tbody");
    this.classCard = h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Page classes" },
      h("table", { class: "classes" }, h("caption", {}, "Page classes"), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Lane groups"),
        h("th", { scope: "col" }, "Codec"), h("th", { scope: "col", class: "number" }, "Tokens"),
        h("th", { scope: "col", class: "number" }, "Page size"))), this.classes));
    this.empty = h("p", { class: "empty" }, "No request of your tenant holds pages.");
    return [
      h("div", { class: "toolbar" },
        h("fieldset", { class: "choices" }, h("legend", {}, "Colour by"), radio("owner", "Owner"), radio("state", "State")),
        this.summary),
      h("div", { class: "card" }, this.canvas, this.empty,
        h("div", { class: "map-foot" }, this.detail,
          h("p", { id: "map-help", class: "hint" }, "Point at a page, or focus the map and press the arrow keys."))),
      h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Legend of the page map" },
        h("table", {}, h("caption", { class: "sr" }, "Owners or states of pages"), h("thead", {}, this.head), this.legend)),
      this.classCard,
    ];
  }

  async refresh() {
    const width = this.canvas.clientWidth || 600;
    const cells = Math.floor(width / SMALLEST_CELL) * Math.floor(MOST_HEIGHT / SMALLEST_CELL);
    this.body = await read(`pages?cells=${Math.min(100000, Math.max(1, cells))}`);
    this.cells = decode(this.body);
    this.empty.hidden = this.body.num_pages > 0;
    this.canvas.hidden = this.body.num_pages === 0;
    const classes = this.body.page_classes;
    const sizes = classes.length === 1 ? `${bytes(classes[0].page_bytes)} each, ${classes[0].page_tokens} tokens in ${classes[0].codec}`
      : `${count(classes.length)} page classes, drawn in proportion to the bytes of their pages`;
    keyed(this.classes, classes.map((one, i) => ({ ...one, i })), (one) => one.i, (one) => h("tr", {},
      h("th", { scope: "row" }, one.groups.join(", ")), h("td", {}, one.codec), h("td", { class: "number" }, count(one.page_tokens)),
      h("td", { class: "number" }, bytes(one.page_bytes))), () => {});
    this.classCard.hidden = classes.length === 1;
    const every = this.body.pages_per_cell > 1 ? ` · every ${ordinal(this.body.pages_per_cell)} page is shown` : "";
    text(this.summary, `${plural(this.body.num_pages, "page")} · ${sizes}${every}`);
    this.legends();
  }

  /** Index of a cell's look: the owner's number, or the state. */
  groupOf(cell) {
    const { owner, state, kind } = this.cells;
    if (this.mode === "owner") return owner[cell];
    return stateOf(owner[cell], state[cell], this.body.page_classes[kind[cell]].quantized);
  }

  lookOfGroup(group) {
    if (this.mode === "state" || group < 2) return STATES[group];
    return lookOf(this.body.owners[group].request_id);
  }

  legends() {
    if (!this.body) return;
    const byOwner = this.mode === "owner";
    const titles = byOwner ? ["Owner", "Tenant", "Pages", "Bytes"] : ["State", "Pages", "Bytes"];
    keyed(this.head, titles, (title) => title, (title) => h("th", {
      scope: "col", class: ["Pages", "Bytes"].includes(title) ? "number" : "",
    }, title), () => {});
    if (byOwner) this.ownerRows();
    else this.stateRows();
  }

  ownerRows() {
    const rows = this.body.owners.filter((one) => one.kind !== "free" || this.body.total_bytes !== undefined)
      .filter((one) => one.owner < 2 ? this.body.total_bytes !== undefined : true)
      .sort((a, b) => (a.owner < 2 || b.owner < 2 ? b.owner - a.owner : b.bytes - a.bytes)).slice(0, MOST_ROWS);
    keyed(this.legend, rows, (one) => `owner ${one.request_id ?? one.kind}`, (one) => h("tr", {},
      h("th", { scope: "row" }, h("span", swatch(one.owner < 2 ? STATES[one.owner] : lookOf(one.request_id))),
        one.request_id ? h("a", { href: `#requests/${encodeURIComponent(one.request_id)}`, title: one.request_id },
          shortId(one.request_id)) : STATES[one.owner].name),
      h("td", {}, one.tenant ?? "–"), h("td", { class: "number" }), h("td", { class: "number" })),
    (node, one) => {
      text(node.children[2], count(one.pages));
      text(node.children[3], bytes(one.bytes));
    });
  }

  stateRows() {
    const { page_classes: classes, pages_per_cell: each } = this.body;
    const rows = STATES.map((look, state) => ({ look, state, pages: 0, bytes: 0 }));
    this.cells.kind.forEach((kind, cell) => {
      const row = rows[this.groupOf(cell)];
      row.pages += each;
      row.bytes += each * classes[kind].page_bytes;
    });
    keyed(this.legend, rows.filter((row) => row.pages), (row) => `state ${row.state}`, (row) => h("tr", {},
      h("th", { scope: "row" }, h("span", swatch(row.look)), row.look.name),
      h("td", { class: "number" }), h("td", { class: "number" })),
    (node, row) => {
      text(node.children[1], count(row.pages));
      text(node.children[2], bytes(row.bytes));
    });
  }

  // ---- drawing ----

  /** Bytes of a row and its pixels: a page of usual size is a square. */
  measure(width) {
    const { ends } = this.cells, total = ends.at(-1);
    const usual = this.cells.squares / total, number = total / usual;
    let size = LARGEST_CELL;
    while (size > SMALLEST_CELL && Math.ceil(number / Math.floor(width / size)) * size > MOST_HEIGHT) size -= 1;
    const columns = Math.floor(width / size);
    this.size = size;
    this.rowWidth = this.body.page_classes.length === 1 ? columns * size : width;
    this.rowBytes = Math.round(columns * usual);
    return Math.ceil(total / this.rowBytes) * size;
  }

  /** Call draw(x, y, width) for each part of a cell: it can continue in the next row. */
  parts(cell, draw) {
    const { ends } = this.cells, to = ends[cell + 1], scale = this.rowWidth / this.rowBytes;
    for (let from = ends[cell]; from < to;) {
      const row = Math.floor(from / this.rowBytes), start = row * this.rowBytes;
      const end = Math.min(to, start + this.rowBytes), x = this.snap((from - start) * scale);
      draw(x, row * this.size, this.snap((end - start) * scale) - x);
      from = end;
    }
  }

  draw() {
    if (!this.cells?.owner.length || this.canvas.hidden || !this.canvas.clientWidth) return;
    const { context: c, scale } = fit(this.canvas, this.measure(this.canvas.clientWidth));
    this.snap = (x) => Math.round(x * scale) / scale;
    const number = this.cells.owner.length, size = this.size;
    const gapOf = (side) => (side >= 6 ? 1 : side >= 4 ? 0.5 : 0), height = size - gapOf(size);
    const fills = new Map();
    for (let cell = 0, last = -1; cell < number; cell += 1) {
      const group = this.groupOf(cell);
      if (!fills.has(group)) {
        const look = this.lookOfGroup(group);
        fills.set(group, fillOf(c, size >= PATTERN_FROM ? look : { ...look, pattern: "solid" }, scale));
      }
      if (group !== last) c.fillStyle = fills.get(group);
      last = group;
      this.parts(cell, (x, y, width) => { if (width > 0) c.fillRect(x, y, width - gapOf(width), height); });
    }
    if (this.cursor >= 0 && this.cursor < number) this.outline(c);
    this.label();
  }

  outline(c) {
    c.lineWidth = 2;
    c.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--text");
    this.parts(this.cursor, (x, y, width) => c.strokeRect(x - 1, y - 1, Math.max(width, 2) + 1, this.size + 1));
  }

  label() {
    const owners = this.body.owners.filter((one) => one.kind === "request" && one.pages);
    const free = this.body.owners[0].pages, cached = this.body.owners[1].pages;
    this.canvas.setAttribute("aria-label", `Map of ${plural(this.body.num_pages, "page")}: `
      + `${count(owners.reduce((sum, one) => sum + one.pages, 0))} of ${plural(owners.length, "request")}, `
      + `${count(cached)} of the prefix cache, ${count(free)} free`);
    text(this.detail, this.cursor >= 0 ? this.describe(this.cursor) : "");
  }

  describe(cell) {
    const owner = this.body.owners[this.cells.owner[cell]], kind = this.body.page_classes[this.cells.kind[cell]];
    const bits = BITS.filter(([bit]) => this.cells.state[cell] & bit).map(([, name]) => name);
    const name = owner.request_id ? `request ${shortId(owner.request_id)}` : STATES[owner.owner].name.toLowerCase();
    const page = cell * this.body.pages_per_cell;
    return [`Page ${count(page)}`, name, bytes(kind.page_bytes), owner.owner ? kind.codec : null, ...bits].filter(Boolean).join(" · ");
  }

  // ---- cursor ----

  point(event) {
    const box = this.canvas.getBoundingClientRect(), x = (event.clientX - box.left) / this.rowWidth;
    const row = Math.floor((event.clientY - box.top) / this.size);
    this.set(x < 1 ? this.at((row + x) * this.rowBytes) : -1);
  }

  /** The cell at a byte of the map; -1: none. */
  at(byte) {
    const { ends } = this.cells;
    let low = 0, high = ends.length - 1;
    if (byte < 0 || byte >= ends[high]) return -1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (ends[middle] <= byte) low = middle;
      else high = middle;
    }
    return low;
  }

  move(event) {
    if (!this.cells) return;
    const { ends } = this.cells, last = this.cells.owner.length - 1, now = Math.max(0, this.cursor);
    const above = (rows) => this.at((ends[now] + ends[now + 1]) / 2 + rows * this.rowBytes);
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, ArrowDown: above(1), ArrowUp: above(-1), Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (this.cursor < 0) this.set(0);
    else if (to >= 0) this.set(Math.min(last, to));
  }

  set(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    this.draw();
  }
}

/** The cells of a page map: owner, state and page class of each, and the bytes before each. */
function decode({ runs, page_classes: classes }) {
  const raw = Object.fromEntries(Object.entries(runs).map(([name, encoded]) =>
    [name, Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0))]));
  const counts = new Uint16Array(raw.count.buffer), owners = new Uint16Array(raw.owner.buffer);
  const total = counts.reduce((sum, one) => sum + one, 0);
  const cells = { owner: new Uint16Array(total), state: new Uint8Array(total), kind: new Uint8Array(total),
    ends: new Float64Array(total + 1), squares: 0 };
  let at = 0;
  counts.forEach((number, run) => {
    cells.owner.fill(owners[run], at, at + number);
    cells.state.fill(raw.state[run], at, at + number);
    cells.kind.fill(raw.page_class[run], at, at + number);
    at += number;
  });
  cells.kind.forEach((kind, cell) => {
    const size = classes[kind].page_bytes;
    cells.ends[cell + 1] = cells.ends[cell] + size;
    cells.squares += size * size;
  });
  return cells;
}
