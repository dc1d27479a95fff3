// KV inspector: the tokens of a request, shaded by how many lanes (layers, heads) retain them.

import { read } from "./api.js";
import { h, keyed, roving, text } from "./dom.js";
import { count, plural } from "./format.js";

const PART = 1024; // tokens shown at a time
const LEVELS = 5;

export class Inspector {
  constructor() {
    this.first = 0;
    this.follows = true; // show the newest part
    this.last = null;
    this.focused = -1;
    this.tokens = h("div", { class: "tokens", role: "listbox", "aria-label": "Tokens of the request, oldest first" });
    this.output = h("output", { class: "token-detail", "aria-live": "polite" }, "Point at a token, or focus one and press the arrow keys.");
    this.lanes = h("div", { class: "lanes", role: "img", "aria-label": "Lanes of the token at the pointer" });
    this.summary = h("p", { class: "facts" });
    this.back = h("button", { type: "button", onclick: () => this.turn(-1) }, "Earlier");
    this.forth = h("button", { type: "button", onclick: () => this.turn(1) }, "Later");
    this.range = h("span", { class: "hint" });
    this.parts = h("div", { class: "parts" }, this.back, this.range, this.forth);
    this.empty = h("p", { class: "empty" });
    const scale = [...Array(LEVELS + 1).keys()].map((level) => h("li", { class: "key" },
      h("span", { class: `token level-${level}` }, "a"), level === 0 ? "no lane" : level === LEVELS ? "all lanes" : `≤ ${(100 * level) / LEVELS} %`));
    this.shown = h("div", {}, this.summary, h("ul", { class: "keys" }, scale, h("li", { class: "key" },
      h("span", { class: "token pending" }, "a"), "not computed")), this.parts, this.tokens,
    h("div", { class: "token-foot" }, this.output, this.lanes));
    this.node = h("section", { class: "inspector", "aria-labelledby": "inspector-title" },
      h("h4", { id: "inspector-title" }, "KV inspector"), this.empty, this.shown);
    this.tokens.addEventListener("pointerover", (event) => {
      const node = event.target.closest(".token");
      if (node) this.describe(Number(node.dataset.position));
    });
    roving(this.tokens, ".token", (node) => this.describe(Number(node.dataset.position)));
  }

  clear() {
    this.first = 0;
    this.follows = true;
    this.last = null;
    this.focused = -1;
    this.tokens.replaceChildren();
    this.lanes.replaceChildren();
    text(this.output, "Point at a token, or focus one and press the arrow keys.");
    this.shown.hidden = true;
    text(this.empty, "Reading tokens.");
  }

  fetch(path) {
    return read(`${path}/tokens?lanes=true&first=${this.first}&limit=${PART}`);
  }

  turn(step) {
    this.first = Math.max(0, this.first + step * PART);
    this.follows = false;
  }

  show(body, request) {
    if (body === null) {
      const seen = this.last !== null;
      text(this.empty, seen ? "The request has finished and its KV was freed. This is its last state."
        : request.state === "finished" ? "The request has finished and its KV was freed. The inspector shows open requests." : "");
      this.empty.hidden = false;
      this.shown.hidden = !seen;
      return;
    }
    const pages = Math.floor((body.num_tokens - 1) / PART) * PART;
    if (this.follows && this.first < pages) { this.first = pages; }
    this.last = { ...body, masks: (body.bitmaps ?? []).map(bits) };
    this.shown.hidden = false;
    this.empty.hidden = body.num_lanes > 0;
    if (!body.num_lanes) text(this.empty, "The request holds no KV in the arena now.");
    this.summaryOf(body);
    const texts = body.texts ?? body.retained.map(() => "▪");
    const items = texts.map((piece, i) => ({ piece, position: body.first + i, retained: body.retained[i] }));
    keyed(this.tokens, items, (item) => item.position, (item) => this.create(item, body), (node, item) => this.update(node, item, body));
    if (!this.tokens.querySelector('[tabindex="0"]') && this.tokens.firstElementChild) this.tokens.firstElementChild.tabIndex = 0;
    if (this.focused >= 0) this.describe(this.focused);
  }

  summaryOf(body) {
    const computed = body.computed_tokens, share = computed ? (100 * body.retained_tokens) / computed : 0;
    const kept = `${share.toFixed(share < 99.95 && share > 0 ? 1 : 0)}\u00a0% of the whole sequence retained`;
    text(this.summary, (body.num_lanes ? `${plural(computed, "computed token")} in each of ${plural(body.num_lanes, "lane")} · ${kept}`
      : plural(body.num_tokens, "token"))
      + (body.texts === null ? " · texts are withheld: start the server with --dashboard or with keys" : ""));
    const many = body.num_tokens > PART;
    this.parts.hidden = !many;
    text(this.range, `tokens ${count(body.first)} to ${count(Math.min(body.num_tokens, body.first + PART) - 1)} of ${count(body.num_tokens)}`);
    this.back.disabled = body.first === 0;
    this.forth.disabled = body.first + PART >= body.num_tokens;
  }

  create(item, body) {
    const node = h("span", { class: "token", role: "option", tabindex: "-1", "data-position": item.position, "aria-selected": "false" });
    if (item.position === body.prompt_tokens) node.classList.add("output-start");
    node.textContent = visible(item.piece);
    if (item.piece.includes("\n")) node.classList.add("breaks");
    return node;
  }

  update(node, item, body) {
    const computed = item.retained !== undefined && body.num_lanes > 0;
    const level = computed ? Math.ceil((item.retained / body.num_lanes) * LEVELS) : -1;
    if (node.dataset.level === String(level)) return;
    node.dataset.level = String(level);
    for (let i = 0; i <= LEVELS; i += 1) node.classList.toggle(`level-${i}`, i === level);
    node.classList.toggle("pending", !computed);
    node.setAttribute("aria-label", `${JSON.stringify(item.piece)}, ${computed ? `${item.retained} of ${body.num_lanes} lanes` : "not computed"}`);
  }

  describe(position) {
    const body = this.last, index = position - (body?.first ?? 0);
    if (!body || index < 0 || index >= (body.texts ?? body.retained).length) return;
    this.focused = position;
    const piece = body.texts ? ` ${JSON.stringify(body.texts[index])}` : "", kept = body.retained[index];
    const where = position < body.prompt_tokens ? "prompt" : "output";
    text(this.output, kept === undefined ? `Token ${count(position)}${piece} (${where}): its KV is not computed yet.`
      : `Token ${count(position)}${piece} (${where}): ${kept} of ${plural(body.num_lanes, "lane")} retain it.`);
    this.showLanes(body, index);
  }

  /** A grid of the lanes: a row for each layer, a cell for each group of heads. */
  showLanes(body, index) {
    const layers = new Map();
    (body.lanes ?? []).forEach((lane, i) => {
      if (!layers.has(lane.layer)) layers.set(lane.layer, []);
      layers.get(lane.layer).push({ ...lane, kept: body.masks[i][index] === true });
    });
    const rows = [...layers].sort(([a], [b]) => a - b);
    keyed(this.lanes, rows, ([layer]) => layer, ([layer]) => h("div", { class: "lane-row" },
      h("span", { class: "lane-name" }, `Layer ${layer}`), h("span", { class: "lane-cells" })),
    (node, [, lanes]) => keyed(node.lastChild, lanes, (lane) => lane.first_head, () => h("span", { class: "lane" }), (cell, lane) => {
      cell.classList.toggle("kept", lane.kept);
      const heads = lane.first_head === lane.last_head ? `head ${lane.first_head}` : `heads ${lane.first_head} to ${lane.last_head}`;
      cell.title = `Layer ${lane.layer}, ${heads}: ${lane.kept ? "retained" : "not retained"}`;
    }));
    const kept = rows.map(([layer, lanes]) => `layer ${layer}: ${lanes.filter((lane) => lane.kept).length} of ${lanes.length}`);
    this.lanes.setAttribute("aria-label", `Lanes that retain the token: ${kept.join(", ")}`);
  }
}

/** Booleans of a bitmap, lowest bit first. */
function bits(encoded) {
  const raw = atob(encoded), found = [];
  for (let i = 0; i < raw.length * 8; i += 1) found.push(Boolean((raw.charCodeAt(i >> 3) >> (i & 7)) & 1));
  return found;
}

function visible(piece) {
  if (piece === "") return "∅";
  return piece.replaceAll("\n", "↵").replaceAll("\t", "→").replace(/^ /, "\u00a0").replace(/ $/, "\u00a0");
}
