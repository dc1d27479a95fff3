// Timeline of one request: phases and events over time, and the same events as a list.

import { h, keyed, s, text } from "./dom.js";
import { describe } from "./events.js";
import { plural, seconds } from "./format.js";

const HEIGHT = 92, TRACK = 36, TRACK_HEIGHT = 18, SIDE = 7;
const THICK = { run: TRACK_HEIGHT, swap: 10, wait: 4 };
const MARKS = {
  chunk: "tick", evicted: "diamond", preempted: "cross", swapped_out: "down", swapped_in: "up",
  offloaded: "down", shared: "tick", copied: "tick", prefix_loaded: "up", first_token: "flag",
};

export class Timeline {
  constructor() {
    this.svg = s("svg", { class: "timeline", role: "img", height: HEIGHT });
    this.list = h("tbody");
    this.note = h("p", { class: "hint" });
    this.body = null;
    this.node = h("section", { "aria-labelledby": "timeline-title" },
      h("h4", { id: "timeline-title" }, "Timeline"), this.svg,
      h("ul", { class: "keys" }, [["wait", "waiting"], ["run", "running"], ["swap", "swapped out"]].map(([kind, name]) =>
        h("li", { class: "key" }, h("span", { class: `phase-key phase-${kind}` }), name)),
      [["diamond", "evicted"], ["cross", "preempted"], ["tick", "prefill chunk"], ["flag", "first token"]].map(([mark, name]) =>
        h("li", { class: "key" }, s("svg", { width: 12, height: 12, viewBox: "-6 -6 12 12", "aria-hidden": "true" }, shape(mark, 0, 0)), name))),
      h("div", { class: "scroll timeline-list", tabindex: "0", role: "region", "aria-label": "Events of the request" },
        h("table", {}, h("caption", { class: "sr" }, "Events, newest first"),
          h("thead", {}, h("tr", {}, ["After", "Event", "Cost and reason"].map((label) => h("th", { scope: "col" }, label)))),
          this.list)), this.note);
  }

  clear() {
    this.body = null;
    this.svg.replaceChildren();
    this.list.replaceChildren();
    text(this.note, "");
  }

  show(body) {
    this.body = body;
    this.events = withMilestones(body);
    this.phases = phasesOf(this.events, body);
    const left = body.num_events - body.timeline.length;
    text(this.note, left > 0 ? `${plural(left, "event")} in between ${left === 1 ? "is" : "are"} not stored.` : "");
    keyed(this.list, [...this.events].reverse(), (event) => event.number, (event) => {
      const { label, detail } = describe(event);
      return h("tr", {}, h("td", { class: "number" }, `+ ${seconds(event.time_s - body.arrival_s)}`),
        h("th", { scope: "row" }, label), h("td", {}, detail));
    }, () => {});
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!this.body || !width) return;
    const { arrival_s: start, finish_s: finish, time_s: now } = this.body;
    const end = Math.max(finish ?? now, start + 1e-6);
    const x = (timeS) => SIDE + ((Math.min(Math.max(timeS, start), end) - start) / (end - start)) * (width - 2 * SIDE);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = this.phases.map((phase) => s("rect", {
      x: x(phase.from), y: TRACK + (TRACK_HEIGHT - THICK[phase.kind]) / 2,
      width: Math.max(1, x(phase.to) - x(phase.from)), height: THICK[phase.kind],
      class: `phase-${phase.kind}`,
    }, s("title", {}, `${phase.name}: ${seconds(phase.to - phase.from)}`)));
    let lastTick = -10;
    for (const event of this.events) {
      const mark = MARKS[event.kind], at = x(event.time_s);
      if (mark === undefined || (mark === "tick" && at - lastTick < 3)) continue;
      if (mark === "tick") lastTick = at;
      const y = mark === "tick" ? TRACK + TRACK_HEIGHT + 6 : mark === "diamond" ? 26 : 9;
      const { label, detail } = describe(event);
      parts.push(s("g", { class: `mark mark-${event.kind}` }, s("title", {}, `${label}: ${detail}`), shape(mark, at, y)));
    }
    for (const [at, anchor, shown] of [[SIDE, "start", "0 s"], [width - SIDE, "end", seconds(end - start)]])
      parts.push(s("text", { x: at, y: HEIGHT - 6, "text-anchor": anchor }, shown));
    this.svg.replaceChildren(...parts);
    const phases = this.phases.map((phase) => `${phase.name} ${seconds(phase.to - phase.from)}`);
    const shown = phases.length > 8 ? [...phases.slice(0, 8), `${phases.length - 8} more phases`] : phases;
    this.svg.setAttribute("aria-label", `Timeline over ${seconds(end - start)}: ${shown.join(", ")}`);
  }
}

/** The stored events, with the submission, the first token and the end. */
function withMilestones(body) {
  const events = [{ kind: "submitted", time_s: body.arrival_s, number: "submitted",
    detail: plural(body.prompt_tokens, "token") + " of prompt" }, ...body.timeline];
  if (body.first_token_s) events.push({ kind: "first_token", time_s: body.first_token_s, number: "first",
    detail: `${seconds(body.first_token_s - body.arrival_s)} after the submission` });
  if (body.finish_s) events.push({ kind: "finished", time_s: body.finish_s, number: "finished",
    detail: `${plural(body.output_tokens, "token")}: ${body.finish_reason}` });
  return events.sort((a, b) => a.time_s - b.time_s);
}

/** Times of waiting, running and being swapped out. */
function phasesOf(events, body) {
  const phases = [], end = body.finish_s ?? body.time_s;
  let kind = "wait", from = body.arrival_s;
  const NAMES = { wait: "waiting", run: "running", swap: "swapped out" };
  const change = (to, timeS) => {
    if (to === kind) return;
    phases.push({ kind, name: NAMES[kind], from, to: timeS });
    kind = to;
    from = timeS;
  };
  for (const event of events) {
    if (event.kind === "admitted") change("run", event.time_s);
    if (event.kind === "swapped_out") change("swap", event.time_s);
    if (event.kind === "freed" && kind === "run" && event.reason !== "finished") change("wait", event.time_s);
  }
  phases.push({ kind, name: NAMES[kind], from, to: end });
  return phases;
}

function shape(mark, x, y) {
  const path = {
    tick: `M${x} ${y - 4}V${y + 4}`,
    diamond: `M${x} ${y - 5}L${x + 5} ${y}L${x} ${y + 5}L${x - 5} ${y}Z`,
    cross: `M${x - 4} ${y - 4}L${x + 4} ${y + 4}M${x + 4} ${y - 4}L${x - 4} ${y + 4}`,
    down: `M${x - 5} ${y - 4}H${x + 5}L${x} ${y + 5}Z`,
    up: `M${x - 5} ${y + 4}H${x + 5}L${x} ${y - 5}Z`,
    flag: `M${x} ${y + 6}V${y - 6}H${x + 6}L${x + 4} ${y - 3}L${x + 6} ${y}H${x}`,
  }[mark];
  return s("path", { d: path, class: `shape shape-${mark}` });
}
