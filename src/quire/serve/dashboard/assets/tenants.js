// Tenants: quota bars and counters.

import { read } from "./api.js";
import { h, keyed, text } from "./dom.js";
import { bytes, count, seconds } from "./format.js";

const NUMBERS = [
  ["Running", (row) => count(row.num_running)], ["Waiting", (row) => count(row.num_waiting)],
  ["Requests", (row) => count(row.num_requests)], ["Prompt tokens", (row) => count(row.prompt_tokens)],
  ["Output tokens", (row) => count(row.output_tokens)], ["Cached tokens", (row) => count(row.cached_tokens)],
  ["Mean wait", (row) => (row.num_admitted ? seconds(row.queue_s / row.num_admitted) : "–")],
  ["Preemptions", (row) => count(row.num_preemptions)], ["Weight", (row) => (row.weight === null ? "–" : String(row.weight))],
];

export class Tenants {
  id = "tenants";
  title = "Tenants";

  constructor(app) {
    this.app = app;
  }

  build() {
    this.list = h("div", { class: "cards" });
    this.empty = h("p", { class: "empty card" }, "No tenant has sent a request yet.");
    return [
      h("ul", { class: "keys" }, [["used", "used"], ["guarantee", "guarantee"], ["limit", "limit: guarantee and burst"]].map(([kind, name]) =>
        h("li", { class: "key" }, h("span", { class: `quota-key quota-${kind}` }), name))),
      this.list, this.empty,
    ];
  }

  async refresh(overview) {
    const { data } = await read("tenants");
    this.empty.hidden = data.length > 0;
    const rows = data.sort((a, b) => b.used_bytes - a.used_bytes || a.tenant.localeCompare(b.tenant));
    keyed(this.list, rows, (row) => row.tenant, (row) => this.create(row), (node, row) => this.update(node, row, overview));
  }

  create(row) {
    return h("article", { class: "card tenant" },
      h("h3", {}, row.tenant),
      h("div", { class: "quota", role: "img" }, h("span", { class: "quota-used" }),
        h("span", { class: "quota-guarantee" }), h("span", { class: "quota-limit" })),
      h("p", { class: "facts" }),
      h("dl", { class: "numbers" }, NUMBERS.map(([name]) => h("div", {}, h("dt", {}, name), h("dd", {})))));
  }

  update(node, row, overview) {
    const [, bar, facts, numbers] = node.children, [used, guarantee, limit] = bar.children;
    const whole = Math.max(overview.memory.total_bytes ?? 0, row.limit_bytes ?? 0, row.guaranteed_bytes, row.used_bytes, 1);
    const at = (size) => `${Math.min(100, (100 * size) / whole)}%`;
    used.style.width = at(row.used_bytes);
    guarantee.style.left = at(row.guaranteed_bytes);
    guarantee.hidden = !row.guaranteed_bytes;
    limit.style.left = at(row.limit_bytes ?? 0);
    limit.hidden = row.limit_bytes === null;
    const parts = [`${bytes(row.used_bytes)} used`,
      row.guaranteed_bytes ? `guarantee ${bytes(row.guaranteed_bytes)}` : "no guarantee",
      row.limit_bytes === null ? "no limit" : `limit ${bytes(row.limit_bytes)}`,
      row.share_bytes ? `share now ${bytes(row.share_bytes)}` : null].filter(Boolean);
    text(facts, parts.join(" · "));
    bar.setAttribute("aria-label", `KV memory of ${row.tenant}: ${parts.join(", ")}`);
    NUMBERS.forEach(([, value], i) => text(numbers.children[i].lastChild, value(row)));
  }
}
