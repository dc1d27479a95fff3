// The prefix cache as a tree: what is cached, how large it is, and when it was used.

import { read } from "./api.js";
import { h, keyed, text } from "./dom.js";
import { bytes, count, plural, seconds } from "./format.js";

export class Prefixes {
  id = "prefixes";
  title = "Prefixes";

  constructor(app) {
    this.app = app;
  }

  build() {
    this.summary = h("p", { class: "facts" });
    this.rows = h("tbody");
    this.empty = h("p", { class: "empty" });
    return [
      this.summary,
      h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Tree of cached prefixes" },
        h("table", { class: "tree" }, h("caption", { class: "sr" }, "Cached prefixes; each level continues the one before"),
          h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Prefix"), h("th", { scope: "col", class: "wide" }, "Tenant"),
            h("th", { scope: "col", class: "number slim" }, "Tokens"), h("th", { scope: "col", class: "number" }, "Bytes"),
            h("th", { scope: "col", class: "number wide" }, "References"), h("th", { scope: "col", class: "number" }, "Last use"))),
          this.rows), this.empty),
    ];
  }

  async refresh() {
    const body = await read("prefixes?limit=300");
    const rows = inTreeOrder(body.data);
    const largest = Math.max(1, ...rows.map((row) => row.bytes));
    text(this.empty, body.enabled ? "The prefix cache is empty. Prompts longer than a block are cached while they are computed."
      : "The prefix cache is off.");
    this.empty.hidden = rows.length > 0;
    const parts = body.enabled ? [`${plural(body.num_blocks + body.num_left_out, "block")} of ${body.block_tokens} tokens`,
      bytes((body.num_blocks + body.num_left_out) * body.block_bytes), plural(body.num_chains, "chain")] : [];
    if (body.num_chains > rows.length) parts.push(`the largest ${rows.length} are shown`);
    text(this.summary, parts.join(" · "));
    keyed(this.rows, rows, (row) => row.key, (row) => this.create(row), (node, row) => this.update(node, row, largest));
  }

  create(row) {
    const name = h("span", { class: "prefix-text" });
    return h("tr", {}, h("th", { scope: "row" }, h("span", { class: "tree-cell", css: { paddingInlineStart: `${Math.min(row.depth, 6) * 18}px` } },
      row.depth ? h("span", { class: "branch", "aria-hidden": "true" }, "└") : null,
      h("span", { class: "sr" }, `Level ${row.depth + 1}: `), name)),
    h("td", { class: "wide" }, row.tenant ?? "all tenants"), h("td", { class: "number slim" }),
    h("td", { class: "number" }, h("span"), h("span", { class: "size" })), h("td", { class: "number wide" }), h("td", { class: "number" }));
  }

  update(node, row, largest) {
    const cells = node.children;
    text(cells[0].querySelector(".prefix-text"), row.text === null ? `tokens ${count(row.start)} to ${count(row.start + row.tokens - 1)}`
      : row.text.replace(/\s+/g, " ").trim() || "…");
    text(cells[2], count(row.tokens));
    text(cells[3].firstChild, bytes(row.bytes));
    cells[3].lastChild.style.width = `${(100 * row.bytes) / largest}%`;
    text(cells[4], count(row.references));
    text(cells[5], row.idle_s === null ? "in use" : `${seconds(Math.floor(row.idle_s))} ago`);
  }
}

/** Rows with their depth, each after its parent, and keys that stay the same. */
function inTreeOrder(data) {
  const children = new Map();
  data.forEach((row, i) => {
    const parent = row.parent ?? -1;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(i);
  });
  const rows = [], visit = (i, depth, path) => {
    const row = data[i], key = `${path}/${row.start}:${row.text ?? i}:${row.tenant}`;
    rows.push({ ...row, depth, key: rows.some((one) => one.key === key) ? `${key}#${i}` : key });
    for (const child of children.get(i) ?? []) visit(child, depth + 1, key);
  };
  const roots = (children.get(-1) ?? []).sort((a, b) => data[b].bytes - data[a].bytes);
  for (const root of roots) visit(root, 0, "");
  return rows;
}
