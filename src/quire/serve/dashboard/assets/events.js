// KV events in words: what happened, at which cost, for which reason.

import { bytes, count, plural, seconds } from "./format.js";

const LABELS = {
  admitted: "Admitted", chunk: "Prefill chunk", shared: "Shared prefix", copied: "Copied",
  evicted: "Evicted", swapped_out: "Swapped out", swapped_in: "Swapped in", offloaded: "Offloaded",
  preempted: "Preempted", freed: "Freed", prefix_cached: "Prefix cached", prefix_evicted: "Prefix evicted",
  prefix_stored: "Prefix stored", prefix_loaded: "Prefix loaded",
  submitted: "Submitted", first_token: "First token", finished: "Finished",
};
const REASONS = { cap: "the cap is reached", replay: "repeated after a recompute" };

/** Label, detail and one-letter mark of an event. */
export function describe(event) {
  return { label: LABELS[event.kind] ?? event.kind, detail: detailOf(event), reason: reasonOf(event) };
}

function reasonOf(event) {
  return event.reason === undefined ? "" : REASONS[event.reason] ?? event.reason;
}

function detailOf(event) {
  const because = reasonOf(event) ? `: ${reasonOf(event)}` : "";
  switch (event.kind) {
    case "admitted": {
      const cached = event.cached_tokens ? `, ${count(event.cached_tokens)} cached` : "";
      const waited = event.waited_s === undefined ? "" : `, after waiting ${seconds(Math.max(0, event.waited_s))}`;
      return `${plural(event.tokens, "token")}${cached}${waited}`;
    }
    case "chunk": return `${plural(event.tokens, "token")}, now ${bytes(event.kv_bytes)}`;
    case "shared": return `${plural(event.tokens, "token")} from the prefix cache`;
    case "copied": return `${bytes(event.kv_bytes)}, copy on write`;
    case "evicted": {
      const freed = event.freed_bytes < 0 ? `${bytes(-event.freed_bytes)} more for copies of shared pages` : `freed ${bytes(event.freed_bytes)}`;
      return `${count(event.tokens)} tokens of each lane, ${freed}${because}`;
    }
    case "swapped_out": case "swapped_in": return `${bytes(event.kv_bytes)} in ${seconds(event.seconds)}`;
    case "offloaded": return bytes(event.kv_bytes);
    case "preempted":
      return `by ${event.how}, freed ${bytes(event.freed_bytes)}, ${count(event.lost_tokens)} tokens to recompute${because}`;
    case "freed": return `${bytes(event.kv_bytes)}${because}`;
    case "prefix_cached": case "prefix_evicted": case "prefix_stored":
      return `${plural(event.blocks, "block")}, ${bytes(event.kv_bytes)}`;
    case "prefix_loaded": return `${plural(event.tokens, "token")}, ${bytes(event.kv_bytes)} in ${seconds(event.seconds)}`;
    default: return event.detail ?? "";
  }
}
