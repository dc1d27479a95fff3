// What if: how many sequences fit in another KV memory, at another length, with eviction.

import { read } from "./api.js";
import { ceiling, fit, FONT } from "./chart.js";
import { h, text } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { resolved } from "./palette.js";

const STEPS = 200, HEIGHT = 200, LEFT = 48, BOTTOM = 24, TOP = 12, RIGHT = 12;
const LIMITS = {
  memory: "KV memory is the limit.", max_num_seqs: "--max-num-seqs is the limit.",
  context: "The model's context is shorter than this length.",
};

const LONGEST = { memory: "limited by the KV memory", context: "the model's context" };

export class Plan {
  id = "plan";
  title = "What if";

  constructor(app) {
    this.app = app;
    this.base = null;
    this.found = null;
    this.number = 0;
  }

  build() {
    this.sliders = {
      budget: this.slider("KV memory", "budget"), length: this.slider("Tokens of a sequence", "length"),
      retained: this.slider("Tokens that eviction retains in each lane", "retained"),
    };
    this.codec = h("select", { id: "plan-codec", onchange: () => this.changed() });
    this.evicts = h("input", { type: "checkbox", id: "plan-evicts", onchange: () => this.changed() });
    this.result = h("p", { class: "result", "aria-live": "polite" });
    this.notes = h("ul", { class: "notes" });
    this.canvas = h("canvas", { role: "img" });
    this.error = h("p", { class: "error", role: "alert" });
    return [
      h("p", { class: "facts" }, "Sequences that fit at once in whole pages, without shared prefixes, computed as by quire plan."),
      h("div", { class: "split even" },
        h("form", { class: "card plan-form", onsubmit: (event) => event.preventDefault() },
          this.sliders.budget.node, this.sliders.length.node,
          h("div", { class: "field" }, h("label", { for: "plan-codec" }, "KV codec"), this.codec),
          h("label", { class: "choice", for: "plan-evicts" }, this.evicts, "Evict tokens"), this.sliders.retained.node),
        h("div", { class: "card" }, this.result, this.notes, this.error,
          h("figure", { class: "chart" }, h("figcaption", {}, h("span", { class: "chart-title" }, "Sequences over KV memory")), this.canvas))),
    ];
  }

  slider(label, name) {
    const id = `plan-${name}`, shown = h("output", { for: id });
    const input = h("input", { type: "range", id, min: 0, max: STEPS, step: 1, value: 0, oninput: () => this.changed() });
    return { input, shown, node: h("div", { class: "slider" }, h("label", { for: id }, label), shown, input) };
  }

  async refresh() {
    if (this.base !== null) return;
    this.base = await read("plan");
    const { current_bytes: now, max_positions: most, codec, codecs } = this.base;
    this.codec.append(...codecs.map((name) => h("option", { value: name }, name === codec ? `${name} (server)` : name)));
    this.least = this.base.smallest_bytes;
    this.most = now * 8;
    this.sliders.budget.input.value = toStep(now, this.least, this.most);
    this.sliders.length.input.value = toStep(Math.min(512, this.app.overview.max_model_len, most), 16, most);
    this.sliders.retained.input.value = toStep(Math.min(128, most), 16, most);
    await this.changed();
  }

  values() {
    const { max_positions: most } = this.base, at = (name) => Number(this.sliders[name].input.value);
    return {
      budget: at("budget") === toStep(this.base.current_bytes, this.least, this.most) ? this.base.current_bytes
        : Math.round(toValue(at("budget"), this.least, this.most)),
      length: tidy(toValue(at("length"), 16, most)), retained: tidy(toValue(at("retained"), 16, most)),
    };
  }

  async changed() {
    const { budget, length, retained } = this.values(), number = this.number += 1;
    const say = (name, shown) => {
      text(this.sliders[name].shown, shown);
      this.sliders[name].input.setAttribute("aria-valuetext", shown);
    };
    say("budget", bytes(budget));
    say("length", plural(length, "token"));
    say("retained", plural(retained, "token"));
    this.sliders.retained.input.disabled = !this.evicts.checked;
    const more = this.evicts.checked ? `&retained=${retained}` : "";
    try {
      const found = await read(`plan?budget_bytes=${budget}&length=${length}&codec=${encodeURIComponent(this.codec.value)}${more}`);
      if (number !== this.number) return; // a later answer is on its way
      this.found = found;
      text(this.error, "");
    } catch (error) {
      text(this.error, error.message);
      return;
    }
    this.show();
    this.draw();
  }

  show() {
    const found = this.found;
    this.result.replaceChildren(h("strong", {}, count(found.sequences)),
      ` ${found.sequences === 1 ? "sequence" : "sequences"} at once`);
    const ratio = found.budget_bytes / found.current_bytes;
    const notes = [
      `${bytes(found.bytes_per_sequence)} for each sequence of ${count(found.length)} tokens`,
      ratio === 1 ? "The KV memory is that of the server." : `The KV memory is ${Number(ratio.toPrecision(2))} times that of the server (${bytes(found.current_bytes)}).`,
      `A single sequence fits up to ${plural(found.longest_tokens, "token")}, ${LONGEST[found.longest_limit]}.`,
      found.sequences > found.max_num_seqs ? `The server runs at most ${count(found.max_num_seqs)} at once (--max-num-seqs).` : LIMITS[found.limit],
    ];
    this.notes.replaceChildren(...notes.map((note) => h("li", {}, note)));
  }

  draw() {
    const found = this.found;
    if (!found || !this.canvas.clientWidth) return;
    const { context: c, width, height } = fit(this.canvas, HEIGHT);
    const perSequence = found.bytes_per_sequence, isLong = found.limit === "context";
    const fitting = (size) => (isLong ? 0 : Math.floor(size / perSequence));
    const top = ceiling(Math.max(4, fitting(this.most)));
    const x = (size) => LEFT + (size / this.most) * (width - LEFT - RIGHT);
    const y = (value) => height - BOTTOM - (value / top) * (height - BOTTOM - TOP);
    c.font = FONT;
    c.fillStyle = resolved("--muted");
    c.strokeStyle = resolved("--line");
    c.lineWidth = 1;
    for (const part of [0, 0.5, 1]) {
      c.textAlign = "right";
      c.textBaseline = "middle";
      c.fillText(count(top * part), LEFT - 8, y(top * part));
      c.beginPath();
      c.moveTo(LEFT, Math.round(y(top * part)) + 0.5);
      c.lineTo(width - RIGHT, Math.round(y(top * part)) + 0.5);
      c.stroke();
    }
    c.textBaseline = "alphabetic";
    for (const [size, align] of [[0, "left"], [this.most / 2, "center"], [this.most, "right"]]) {
      c.textAlign = align;
      c.fillText(size ? bytes(size) : "0", x(size), height - 6);
    }
    const color = resolved("--series-1");
    c.strokeStyle = color;
    c.lineWidth = 2;
    c.beginPath();
    c.moveTo(x(0), y(0));
    const steps = fitting(this.most), skip = Math.max(1, Math.ceil(steps / 400));
    for (let step = skip; step <= steps; step += skip) {
      c.lineTo(x(step * perSequence), y(step - skip));
      c.lineTo(x(step * perSequence), y(step));
    }
    c.lineTo(x(this.most), y(steps));
    c.stroke();
    c.setLineDash([4, 4]);
    c.strokeStyle = resolved("--muted");
    c.lineWidth = 1;
    c.beginPath();
    c.moveTo(x(found.current_bytes), y(0));
    c.lineTo(x(found.current_bytes), TOP);
    c.stroke();
    c.setLineDash([]);
    c.textAlign = x(found.current_bytes) > width / 2 ? "right" : "left";
    c.fillText("now", x(found.current_bytes) + (x(found.current_bytes) > width / 2 ? -5 : 5), TOP + 8);
    c.fillStyle = color;
    c.beginPath();
    c.arc(x(found.budget_bytes), y(found.sequences), 5, 0, 7);
    c.fill();
    this.canvas.setAttribute("aria-label", `Sequences over KV memory up to ${bytes(this.most)}: `
      + `${count(found.sequences)} at ${bytes(found.budget_bytes)}, ${count(fitting(this.most))} at ${bytes(this.most)}`);
  }
}

const toValue = (step, least, most) => least * (most / least) ** (step / STEPS);
const toStep = (value, least, most) => Math.round((STEPS * Math.log(value / least)) / Math.log(most / least));
const tidy = (value) => (value < 64 ? Math.round(value) : Math.round(value / 16) * 16);
