// Overview: memory by owner and state, rates, latencies, newest events.

import { read } from "./api.js";
import { TimeChart } from "./chart.js";
import { h, keyed, text } from "./dom.js";
import { describe } from "./events.js";
import { bytes, count, percent, plural, rate, seconds, shortId } from "./format.js";
import { lookOf, STATES, swatch } from "./palette.js";

const MOST_SEGMENTS = 12;
const SHOWN_EVENTS = 10;
const BORDERS = { color: "--line", pattern: "solid" };
const OTHERS = { color: "--others", pattern: "cross" };

const TILES = [
  ["running", "Running"], ["waiting", "Waiting"], ["tokens", "Output tokens/s"],
  ["ttft", "Time to first token"], ["itl", "Time per output token"], ["hits", "Prefix cache hits"],
  ["preemptions", "Preemptions"], ["evictions", "Evicted tokens"],
];

export class Overview {
  id = "overview";
  title = "Overview";

  constructor(app) {
    this.app = app;
    this.last = null;
    this.tokensPerS = null;
  }

  build() {
    this.tiles = Object.fromEntries(TILES.map(([name]) => [name, {
      value: h("dd", { class: "tile-value" }, "–"), note: h("dd", { class: "tile-note" }),
    }]));
    this.byOwner = new Bar("KV memory by owner");
    this.byState = new Bar("KV memory by state");
    this.charts = {
      tokens: new TimeChart("Output tokens per second", [{ name: "tokens/s", color: "var(--series-1)" }], { format: rate }),
      requests: new TimeChart("Requests", [
        { name: "running", color: "var(--series-1)" }, { name: "waiting", color: "var(--series-2)", dash: true },
      ], { format: count, integer: true }),
      memory: new TimeChart("KV memory of requests", [{ name: "bytes", color: "var(--series-1)" }], { format: bytes, binary: true }),
      latency: new TimeChart("Time to first token, last 60 s", [
        { name: "median", color: "var(--series-1)" }, { name: "90th percentile", color: "var(--series-2)", dash: true },
      ], { format: seconds, duration: true }),
    };
    this.events = h("ol", { class: "feed" });
    this.noEvents = h("p", { class: "empty" }, "No events yet.");
    this.facts = h("p", { class: "facts" });
    return [
      this.facts,
      h("dl", { class: "tiles" }, TILES.map(([name, title]) => h("div", { class: "tile card" },
        h("dt", {}, title), this.tiles[name].value, this.tiles[name].note))),
      h("div", { class: "bars" }, this.byOwner.node, this.byState.node),
      h("div", { class: "charts" }, Object.values(this.charts).map((chart) => chart.node)),
      h("section", { class: "card", "aria-labelledby": "events-title" },
        h("h3", { id: "events-title" }, "Newest events"), this.events, this.noEvents),
    ];
  }

  /** Add a point to the charts; called in every view, so that the charts have no gaps. */
  note({ time_s: timeS, num_running: running, num_waiting: waiting, memory, counters, latency }) {
    const ttft = latency.ttft_s;
    this.charts.memory.most = memory.total_bytes ?? memory.limit_bytes ?? null;
    this.plot(timeS, running, waiting, memory.requests_bytes, counters.generated_tokens, ttft?.p50 ?? null, ttft?.p90 ?? null);
  }

  /** Add a point of /v1/kv/history, whose columns have this order. */
  plot(timeS, running, waiting, held, generated, median, slow) {
    const spent = timeS - (this.last?.timeS ?? timeS);
    if (this.last && spent <= 0) return;
    if (this.last) this.tokensPerS = Math.max(0, (generated - this.last.generated) / spent);
    this.last = { timeS, generated };
    this.charts.tokens.add(timeS, [this.tokensPerS]);
    this.charts.requests.add(timeS, [running, waiting]);
    this.charts.memory.add(timeS, [held]);
    this.charts.latency.add(timeS, [median, slow]);
  }

  async refresh(overview) {
    const pages = await read("pages?map=false");
    this.tilesOf(overview);
    this.factsOf(overview);
    this.byOwner.show(ownerParts(pages, overview));
    this.byState.show({ ...stateParts(pages, overview), note: overlaps(pages) });
    const newest = this.app.events.slice(0, SHOWN_EVENTS);
    this.noEvents.hidden = newest.length > 0;
    keyed(this.events, newest, (event) => event.number, () => h("li"), (node, event) => {
      const { label, detail } = describe(event);
      if (!node.firstChild) node.append(
        h("span", { class: `kind kind-${event.kind}` }, label), h("span", { class: "feed-detail" },
          event.request_id ? h("a", { href: `#requests/${encodeURIComponent(event.request_id)}` }, shortId(event.request_id)) : "prefix cache",
          ` ${detail}`), h("time", {}));
      const age = Math.floor(overview.time_s - event.time_s);
      text(node.lastChild, age < 1 ? "now" : `${seconds(age)} ago`);
    });
  }

  tilesOf(overview) {
    const { counters, latency } = overview, show = (name, value, note = "") => {
      text(this.tiles[name].value, value);
      text(this.tiles[name].note, note);
    };
    show("running", count(overview.num_running), overview.max_num_seqs ? `of ${count(overview.max_num_seqs)} slots` : "");
    show("waiting", count(overview.num_waiting), overview.num_waiting ? "see Requests for causes" : "none");
    show("tokens", this.tokensPerS === null ? "–" : rate(this.tokensPerS), `${count(counters.generated_tokens)} in total`);
    for (const [name, found] of [["ttft", latency.ttft_s], ["itl", latency.itl_s]])
      show(name, found ? seconds(found.p50) : "–", found ? `p90 ${seconds(found.p90)}` : `no request in ${latency.window_s} s`);
    const queried = counters.queried_tokens;
    show("hits", queried === undefined ? count(counters.cached_tokens) : percent(counters.cached_tokens, queried),
      queried === undefined ? "tokens" : `${count(counters.cached_tokens)} tokens`);
    show("preemptions", count(counters.preemptions), counters.swaps === undefined ? "" : plural(counters.swaps, "swap"));
    show("evictions", counters.evicted_tokens === undefined ? "–" : count(counters.evicted_tokens),
      counters.evictions === undefined ? "" : plural(counters.evictions, "eviction"));
  }

  factsOf(overview) {
    const eviction = overview.evict === "full" ? "no eviction by default" : `default eviction ${overview.evict}`;
    const sparse = overview.sparse === "off" ? [] : [`default sparse attention ${overview.sparse}`];
    const parts = [`codec ${overview.codec}`, eviction, ...sparse,
      `longest accepted request ${count(overview.max_model_len)} tokens`];
    if (overview.tenant) parts.unshift(`tenant ${overview.tenant}`);
    text(this.facts, parts.join(" · "));
  }

  draw() {
    for (const chart of Object.values(this.charts)) chart.draw();
  }
}

/** Parts of the memory bar by owner: the largest requests, all others, the cache, free memory. */
function ownerParts(pages, overview) {
  const requests = pages.owners.filter((one) => one.kind === "request" && one.bytes > 0)
    .sort((a, b) => b.bytes - a.bytes);
  const shown = requests.slice(0, MOST_SEGMENTS), rest = requests.slice(MOST_SEGMENTS);
  const parts = shown.map((one) => ({ name: shortId(one.request_id), bytes: one.bytes, look: lookOf(one.request_id) }));
  if (rest.length) parts.push({ name: `${count(rest.length)} more`, look: OTHERS,
    bytes: rest.reduce((sum, one) => sum + one.bytes, 0) });
  return withRest(parts, pages, overview);
}

function stateParts(pages, overview) {
  const { exact, evicted, quantized } = pages.states;
  const cached = pages.owners[1].bytes;
  const parts = [[2, exact - cached], [4, evicted], [5, quantized]].map(([state, size]) =>
    ({ name: STATES[state].name, bytes: Math.max(0, size), look: STATES[state] }));
  // pages of the cache are exact, or quantized if the codec quantizes
  if (exact < cached) parts[2].bytes = Math.max(0, quantized - cached);
  if (exact < cached) parts[0].bytes = 0;
  return withRest(parts.filter((part) => part.bytes > 0), pages, overview);
}

function withRest(parts, pages, overview) {
  const total = pages.total_bytes;
  if (total === undefined) return { parts, total: overview.memory.limit_bytes ?? null };
  const cached = pages.owners[1].bytes;
  if (cached) parts.push({ name: "Prefix cache", bytes: cached, look: STATES[1] });
  if (overview.memory.border_bytes) parts.push({ name: "Too small for a page", bytes: overview.memory.border_bytes, look: BORDERS });
  parts.push({ name: "Free", bytes: pages.free_bytes, look: STATES[0] });
  return { parts, total, note: outside(pages) };
}

/** CPU memory that holds KV. */
function outside({ swap, offload }) {
  const parts = [];
  if (swap?.total_bytes) parts.push(`swap space ${bytes(swap.used_bytes)} of ${bytes(swap.total_bytes)}`);
  if (offload?.total_bytes) parts.push(`KV offload ${bytes(offload.used_bytes)} of ${bytes(offload.total_bytes)}`);
  return parts.length ? `CPU memory: ${parts.join(", ")}` : "";
}

/** States that overlap with those of the bar. */
function overlaps({ states }) {
  return `Several requests share ${bytes(states.shared)}; ${bytes(states.cached)} can be found in the prefix cache.`;
}

/** A stacked bar with a legend that names every part and its bytes. */
class Bar {
  constructor(title) {
    this.total = h("span", { class: "bar-total" });
    this.bar = h("div", { class: "bar", role: "img" });
    this.legend = h("ul", { class: "legend" });
    this.empty = h("p", { class: "empty" }, "No request holds KV.");
    this.note = h("p", { class: "bar-note" });
    this.title = title;
    this.node = h("section", { class: "card" },
      h("h3", {}, title, this.total), this.bar, this.legend, this.empty, this.note);
  }

  show({ parts, total, note = "" }) {
    const sum = parts.reduce((all, part) => all + part.bytes, 0), whole = total ?? sum;
    text(this.total, total === null ? bytes(sum) : bytes(total));
    this.bar.setAttribute("aria-label", `${this.title}: ${parts.map((part) =>
      `${part.name} ${bytes(part.bytes)}`).join(", ") || "empty"}`);
    const update = (node, part) => { node.style.width = whole ? `${(100 * part.bytes) / whole}%` : "0"; };
    keyed(this.bar, parts, (part) => part.name, (part) => h("span", { ...swatch(part.look), title: part.name }), update);
    keyed(this.legend, parts, (part) => part.name, (part) => h("li", {},
      h("span", swatch(part.look)), h("span", { class: "legend-name" }, part.name), h("span", { class: "legend-value" })),
    (node, part) => text(node.lastChild, bytes(part.bytes)));
    this.empty.hidden = sum > 0;
    text(this.note, note);
  }
}
