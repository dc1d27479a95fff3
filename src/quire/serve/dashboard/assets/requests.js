// Requests: a table, and for the selected one its numbers, timeline and tokens.

import { read } from "./api.js";
import { h, keyed, text } from "./dom.js";
import { bytes, count, plural, seconds, shortId } from "./format.js";
import { Inspector } from "./inspector.js";
import { lookOf, swatch } from "./palette.js";
import { Timeline } from "./timeline.js";

const CAUSES = {
  queue: (why) => `behind ${plural(why.ahead, "request")}`,
  tenant_limit: () => "its tenant is at its KV limit",
  slots: () => "all batch slots are in use (--max-num-seqs)",
  memory: (why) => `needs ${bytes(why.needed_bytes)} of KV memory, ${freeOf(why)}`
    + (why.promised_bytes ? `; running requests will need ${bytes(why.promised_bytes)}` : ""),
  slabs: (why) => `needs ${bytes(why.needed_bytes)} of KV memory, ${freeOf(why)}; the rest is divided into pages of other sizes`,
  prefill: (why) => `the prompt of ${why.after ? shortId(why.after) : "a running request"} waits for pages before it`,
  tokens: () => "the last step had no tokens left (--max-num-batched-tokens)",
  batch: () => "the batching rule admits none now",
  next_step: () => "is tried in the next step",
};
const freeOf = (why) => (why.free_bytes === null ? "too little is free" : `${bytes(why.free_bytes)} free`);
const COLUMNS = [
  ["request", "Request", ""], ["state", "State", ""], ["tenant", "Tenant", "wide"],
  ["tokens", "Tokens", "number"], ["retained", "Retained", "number wide"], ["kv", "KV", "number"],
  ["preempted", "Preempted", "number wide"], ["time", "Time", "number slim"],
];
const FILTERS = [["all", "All"], ["running", "Running"], ["waiting", "Waiting"], ["finished", "Finished"]];

export class Requests {
  id = "requests";
  title = "Requests";

  constructor(app) {
    this.app = app;
    this.filter = "all";
    this.chosen = "";
    this.inspector = new Inspector();
    this.timeline = new Timeline();
  }

  build() {
    this.rows = h("tbody");
    this.empty = h("p", { class: "empty" }, "No requests yet. Send one to /v1/completions.");
    this.counts = h("p", { class: "facts" });
    const choices = FILTERS.map(([value, label]) => h("label", { class: "choice" },
      h("input", { type: "radio", name: "request-filter", value, checked: value === this.filter,
        onchange: () => { this.filter = value; this.app.tick(); } }), label));
    this.detail = h("div", { class: "detail card", hidden: true, tabindex: "-1", role: "region", "aria-label": "Selected request" });
    this.heading = h("h3", {});
    this.numbers = h("dl", { class: "numbers" });
    this.gone = h("p", { class: "note" });
    this.detail.append(
      h("div", { class: "detail-head" }, this.heading,
        h("button", { type: "button", onclick: () => this.close() }, "Close")),
      this.gone, this.numbers, this.timeline.node, this.inspector.node);
    return [
      h("div", { class: "toolbar" }, h("fieldset", { class: "choices" }, h("legend", {}, "Show"), choices), this.counts),
      h("div", { class: "split" },
        h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Table of requests" },
          h("table", { class: "requests" }, h("caption", { class: "sr" }, "Requests"),
            h("thead", {}, h("tr", {}, COLUMNS.map(([, label, kind]) => h("th", { scope: "col", class: kind }, label)))),
            this.rows), this.empty),
        this.detail),
    ];
  }

  select(id) {
    if (id === this.chosen) return;
    this.chosen = id;
    this.detail.hidden = !id;
    this.node.classList.toggle("has-detail", Boolean(id));
    this.inspector.clear();
    this.timeline.clear();
    this.numbers.replaceChildren();
    text(this.gone, "");
    text(this.heading, id ? `Request ${shortId(id)}` : "");
    this.heading.title = id;
  }

  close() {
    const back = this.rows.querySelector('[aria-current="true"] a');
    location.hash = "#requests";
    back?.focus();
  }

  async refresh() {
    const body = await read("requests?limit=200");
    const parts = [`${count(body.num_running)} running`, `${count(body.num_waiting)} waiting`,
      `${count(body.finished.length)} finished recently`];
    text(this.counts, parts.join(" · "));
    const all = [...body.running, ...body.waiting, ...body.finished];
    const rows = this.filter === "all" ? all : body[this.filter];
    this.empty.hidden = rows.length > 0;
    keyed(this.rows, rows, (row) => row.request_id, (row) => this.create(row), (node, row) => this.update(node, row, body.time_s));
    if (this.chosen) await this.refreshDetail();
  }

  create(row) {
    return h("tr", {}, COLUMNS.map(([name, , kind]) => name === "request"
      ? h("th", { scope: "row" }, h("span", swatch(lookOf(row.request_id))),
        h("a", { href: `#requests/${encodeURIComponent(row.request_id)}`, title: row.request_id }, shortId(row.request_id)))
      : h("td", { class: kind })));
  }

  update(node, row, nowS) {
    const end = row.finish_s ?? nowS;
    const values = {
      tenant: row.tenant, tokens: `${count(row.prompt_tokens)} + ${count(row.output_tokens)}`,
      retained: row.state === "running" ? count(row.retained_tokens) : "–",
      kv: row.kv_bytes ? bytes(row.kv_bytes) : row.host_bytes ? bytes(row.host_bytes) : "–",
      preempted: row.num_preemptions ? `${row.num_preemptions}×` : "–", time: seconds(end - row.arrival_s),
    };
    COLUMNS.forEach(([name], i) => { if (name in values) text(node.children[i], values[name]); });
    const badge = node.children[1], shown = stateOf(row);
    if (badge.dataset.state !== shown.name) {
      badge.dataset.state = shown.name;
      badge.replaceChildren(h("span", { class: `badge badge-${shown.kind}` }, shown.name), h("span", { class: "why" }));
    }
    text(badge.lastChild, row.waiting ? CAUSES[row.waiting.cause](row.waiting) : "");
    if (row.request_id === this.chosen) node.setAttribute("aria-current", "true");
    else node.removeAttribute("aria-current");
  }

  // ---- selected request ----

  async refreshDetail() {
    const id = this.chosen, path = `requests/${encodeURIComponent(id)}`;
    const one = await read(path);
    if (id !== this.chosen) return;
    if (one === null) {
      text(this.gone, "This request is unknown: it finished long ago, or it belongs to another tenant.");
      return;
    }
    const tokens = one.state === "finished" ? null : await this.inspector.fetch(path);
    if (id !== this.chosen) return;
    this.showNumbers(one);
    this.timeline.show(one);
    this.inspector.show(tokens, one);
  }

  showNumbers(one) {
    const wait = one.waiting ? CAUSES[one.waiting.cause](one.waiting) : null;
    const entries = [
      ["State", wait ? `${one.state}: ${wait}` : one.finish_reason ? `finished: ${one.finish_reason}` : one.state],
      ["Tenant", one.tenant], ["Eviction", one.evict],
      ["Sparse attention", one.sparse === "off" ? null : one.sparse], ["Stored as", one.codec],
      ["Prompt", plural(one.prompt_tokens, "token")], ["Output", `${count(one.output_tokens)} of at most ${count(one.max_tokens)}`],
      ["From prefix cache", plural(one.cached_tokens, "token")],
      ["KV", one.kv_bytes ? bytes(one.kv_bytes) : "none"], ["KV peak", bytes(one.kv_peak_bytes)],
      ["Swapped", one.host_bytes ? bytes(one.host_bytes) : null],
      ["Offloaded", one.offloaded_bytes ? bytes(one.offloaded_bytes) : null],
      ["Evicted", one.num_evictions ? `${count(one.evicted_tokens)} tokens in ${plural(one.num_evictions, "eviction")}` : "none"],
      ["Preempted", one.num_preemptions ? `${one.num_preemptions}×` : "never"],
      ["Time to first token", one.first_token_s ? seconds(one.first_token_s - one.arrival_s) : "–"],
    ].filter(([, value]) => value !== null);
    keyed(this.numbers, entries, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd", {})),
      (node, [, value]) => text(node.lastChild, value));
  }

  draw() {
    this.timeline.draw();
  }
}

function stateOf(row) {
  if (row.state === "running") return { name: "Running", kind: "running" };
  if (row.state === "waiting") {
    const name = row.host_bytes ? "Swapped" : row.num_preemptions ? "Preempted" : "Waiting";
    return { name, kind: "waiting" };
  }
  const aborted = ["abort", "error"].includes(row.finish_reason);
  return { name: aborted ? row.finish_reason === "abort" ? "Cancelled" : "Error" : "Finished", kind: aborted ? "error" : "finished" };
}
