// Elements without a framework: creation, and keyed updates that keep focus and hover.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element: h("p", {class: "x", onclick: f}, "text", child). */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Create an SVG element. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "css") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Set the text of a node only if it differs, so that screen readers repeat nothing. */
export function text(node, value) {
  const wanted = String(value);
  if (node.textContent !== wanted) node.textContent = wanted;
  return node;
}

/**
 * Make the children of a container match items; nodes of known keys are kept and moved.
 * @param create makes a node of an item
 * @param update writes an item to its node
 */
export function keyed(container, items, key, create, update) {
  const known = new Map([...container.children].map((node) => [node.dataset.key, node]));
  let before = container.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let node = known.get(name);
    if (node === undefined) {
      node = create(item);
      node.dataset.key = name;
    }
    known.delete(name);
    if (node === before) before = before.nextElementSibling;
    else container.insertBefore(node, before);
    update(node, item);
  }
  for (const node of known.values()) node.remove();
}

/** Arrow keys, Home and End move the focus among the items of a container; one is in tab order. */
export function roving(container, selector, onMove) {
  const items = () => [...container.querySelectorAll(selector)];
  const focus = (node) => {
    for (const other of container.querySelectorAll(`${selector}[tabindex="0"]`)) other.tabIndex = -1;
    node.tabIndex = 0;
    if (document.activeElement !== node) node.focus();
    onMove?.(node);
  };
  container.addEventListener("keydown", (event) => {
    const list = items();
    const at = list.indexOf(event.target.closest(selector));
    if (at < 0) return;
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1,
      Home: 0, End: list.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    focus(list[Math.max(0, Math.min(list.length - 1, to))]);
  });
  container.addEventListener("focusin", (event) => {
    const node = event.target.closest(selector);
    if (node !== null && node.tabIndex !== 0) focus(node);
    else if (node !== null) onMove?.(node);
  });
}
