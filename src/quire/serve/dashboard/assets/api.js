// The server's JSON under /v1/kv, and its stream of events.

const KEY = "quire.key";
const PATIENCE_MS = 10000;

export class Refused extends Error {}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

function headers(more = {}) {
  const own = key.get();
  return own ? { Authorization: `Bearer ${own}`, ...more } : more;
}

/** The body of a path under /v1/kv; null for status 404. Raises Refused for status 401. */
export async function read(path) {
  const response = await fetch(`v1/kv/${path}`, {
    headers: headers(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (response.status === 401) throw new Refused("The server needs an API key.");
  if (response.status === 404) return null;
  const body = await response.json();
  if (!response.ok) throw new Error(body?.error?.message ?? `Status ${response.status}`);
  return body;
}

/** Receive events until the signal aborts; reconnects after the last event that it received. */
export async function follow(onEvent, signal) {
  let last = null, pause = 1000;
  while (!signal.aborted) {
    try {
      const more = last === null ? {} : { "Last-Event-ID": String(last) };
      const response = await fetch("v1/kv/events/stream", { headers: headers(more), signal });
      if (!response.ok) throw new Error(`Status ${response.status}`);
      pause = 1000;
      for await (const event of parse(response.body, signal)) {
        if (event.id !== null) last = event.id;
        onEvent(event.data, event.name);
      }
    } catch (error) {
      if (signal.aborted) return;
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, 15000);
  }
}

async function* parse(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  while (!signal.aborted) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const event = { id: null, name: "message", data: null };
      for (const line of part.split("\n")) {
        if (line.startsWith("id: ")) event.id = Number(line.slice(4));
        else if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("data: ")) event.data = JSON.parse(line.slice(6));
      }
      if (event.data !== null) yield event;
    }
  }
}
