// The page: navigation, polling of the visible view, connection, theme and API key.

import { follow, key, read, Refused } from "./api.js";
import { h, text } from "./dom.js";
import { Overview } from "./overview.js";
import { Pages } from "./pages.js";
import { Plan } from "./plan.js";
import { Prefixes } from "./prefixes.js";
import { Requests } from "./requests.js";
import { Tenants } from "./tenants.js";

const TICK_MS = 1000, MOST_EVENTS = 200;
const THEME = "quire.theme";
const THEMES = ["system", "light", "dark"];
const byId = (id) => document.getElementById(id);

class App {
  constructor() {
    this.overview = null; // the newest response of /v1/kv/overview
    this.events = []; // the newest events, last first
    this.paused = false;
    this.views = [Overview, Pages, Requests, Tenants, Prefixes, Plan].map((View) => new View(this));
    this.view = null;
    this.stream = null;
    this.timer = null;
  }

  start() {
    byId("nav").append(h("ul", {}, this.views.map((view) => h("li", {},
      h("a", { href: `#${view.id}`, id: `nav-${view.id}` }, view.title)))));
    for (const view of this.views) {
      view.node = h("section", { id: `view-${view.id}`, "aria-labelledby": `title-${view.id}`, hidden: true },
        h("h2", { id: `title-${view.id}` }, view.title), view.build());
      byId("main").append(view.node);
    }
    addEventListener("hashchange", () => this.show(true));
    document.addEventListener("visibilitychange", () => this.resume());
    byId("pause").addEventListener("click", () => this.pause(!this.paused));
    byId("theme").addEventListener("click", () => this.nextTheme());
    this.setTheme(localStorage.getItem(THEME) ?? "system");
    this.bindKey();
    new ResizeObserver(() => this.view?.draw?.()).observe(byId("main"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.view?.draw?.());
    this.resume();
    this.show(false);
  }

  /** Show the view of the address; `#requests/ID` also selects a request. */
  show(moves) {
    const [id, ...rest] = location.hash.slice(1).split("/");
    const view = this.views.find((one) => one.id === id) ?? this.views[0];
    for (const one of this.views) {
      one.node.hidden = one !== view;
      byId(`nav-${one.id}`).toggleAttribute("aria-current", false);
    }
    byId(`nav-${view.id}`).setAttribute("aria-current", "page");
    const changed = this.view !== view;
    this.view = view;
    document.title = `${view.title} · Quire dashboard`;
    view.select?.(decodeURIComponent(rest.join("/")));
    if (moves && changed) byId("main").focus({ preventScroll: true });
    if (moves && changed) scrollTo({ top: 0 });
    this.tick();
  }

  get runs() {
    return !this.paused && document.visibilityState === "visible";
  }

  pause(paused) {
    this.paused = paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    text(byId("pause"), paused ? "Resume" : "Pause");
    this.resume();
  }

  /** Poll and listen while the page is visible and not paused. */
  resume() {
    clearTimeout(this.timer);
    this.timer = null;
    this.stream?.abort();
    this.stream = null;
    if (!this.runs) {
      if (this.paused) this.status("paused", "Paused");
      return;
    }
    this.stream = new AbortController();
    follow((event, name) => this.receive(event, name), this.stream.signal);
    this.isFilled = false;
    this.tick();
  }

  /** Read what happened before the page was opened, or while it was hidden or paused. */
  async fill() {
    const overview = this.views[0], signal = this.stream.signal;
    const [history, stored] = await Promise.all([read("history"), read(`events?limit=${MOST_EVENTS}`)]);
    if (signal.aborted || this.isFilled) return;
    this.isFilled = true;
    for (const point of history.data) overview.plot(...point);
    const events = new Map([...stored.data, ...this.events].map((event) => [event.number, event]));
    this.events = [...events.values()].sort((a, b) => b.number - a.number).slice(0, MOST_EVENTS);
  }

  receive(event, name) {
    if (name !== "message") return;
    this.events.unshift(event);
    this.events.length = Math.min(this.events.length, MOST_EVENTS);
  }

  async tick() {
    clearTimeout(this.timer);
    if (!this.runs || !this.view) return;
    const view = this.view;
    try {
      if (!this.isFilled) await this.fill();
      this.overview = await read("overview");
      text(byId("model"), this.overview.model);
      for (const one of this.views) one.note?.(this.overview);
      await view.refresh(this.overview);
      if (view === this.view) view.draw?.();
      if (this.runs) this.status("live", "Live");
    } catch (error) {
      this.fail(error);
    }
    clearTimeout(this.timer);
    this.timer = this.runs ? setTimeout(() => this.tick(), TICK_MS) : null;
  }

  fail(error) {
    if (error instanceof Refused) {
      this.status("error", "API key needed");
      byId("key").hidden = false;
      if (!byId("key-dialog").open) this.askKey(key.get() ? "The server does not know this key." : "");
      return;
    }
    const reason = error instanceof TypeError || error.name === "TimeoutError" ? "No connection" : error.message;
    this.status("error", reason);
  }

  status(kind, shown) {
    byId("status").dataset.kind = kind;
    text(byId("status-text"), shown);
  }

  // ---- theme ----

  nextTheme() {
    const now = document.documentElement.dataset.theme ?? "system";
    this.setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
    this.view.draw?.();
  }

  setTheme(theme) {
    const known = THEMES.includes(theme) ? theme : "system";
    if (known === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = known;
    localStorage.setItem(THEME, known);
    text(byId("theme"), `Theme: ${known}`);
  }

  // ---- API key ----

  bindKey() {
    byId("key").hidden = !key.get();
    byId("key").addEventListener("click", () => this.askKey(""));
    byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
    byId("key-form").addEventListener("submit", () => {
      key.set(byId("key-input").value.trim());
      byId("key-input").value = "";
      byId("key").hidden = false;
      this.resume();
    });
  }

  askKey(error) {
    text(byId("key-error"), error);
    byId("key-dialog").showModal();
    byId("key-input").focus();
  }
}

new App().start();
