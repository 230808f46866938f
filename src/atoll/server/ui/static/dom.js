// Builds elements from data. Text that ranks print is only ever inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const h = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export function put(element, ...children) {
  element.replaceChildren(
    ...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false),
  );
  return element;
}

// Replaces the children only if the data they show has changed, so that an update never takes the
// focus away.
export function replaceIfChanged(element, data, make) {
  const sign = JSON.stringify(data);
  if (element.dataset.sign === sign) return;
  element.dataset.sign = sign;
  put(element, make());
}

// Updates a list by key. Elements of unchanged items stay, so that focus, selection and scrolling
// survive.
export function patch(parent, items, keyOf, signOf, make) {
  const before = new Map();
  for (const child of parent.children) before.set(child.dataset.key, child);
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item),
      sign = signOf(item);
    let element = before.get(key);
    before.delete(key);
    if (!element || element.dataset.sign !== sign) {
      const fresh = make(item);
      fresh.dataset.key = key;
      fresh.dataset.sign = sign;
      if (element) {
        const focused = element.contains(document.activeElement)
          ? document.activeElement.dataset.focus
          : null;
        if (element === at) at = at.nextElementSibling;
        element.replaceWith(fresh);
        if (focused) fresh.querySelector(`[data-focus="${focused}"]`)?.focus();
        element = fresh;
        if (element.nextElementSibling !== at) parent.insertBefore(element, at);
        continue;
      }
      element = fresh;
    }
    if (element !== at) parent.insertBefore(element, at);
    else at = at.nextElementSibling;
  }
  for (const removed of before.values()) removed.remove();
}

const SHAPES = {
  pending: () =>
    svg("circle", {
      cx: 6,
      cy: 6,
      r: 4.4,
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 1.8,
      "stroke-dasharray": "3 2.2",
    }),
  running: () => svg("circle", { cx: 6, cy: 6, r: 5, fill: "currentColor" }),
  succeeded: () =>
    svg("path", {
      d: "M1.5 6.5 4.7 9.600 10.500 2.600",
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 2.2,
    }),
  failed: () =>
    svg("path", {
      d: "M2 2 10 10M10 2 2 10",
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 2.4,
    }),
  cancelled: () =>
    svg("path", {
      d: "M1.500 1.500H10.500V10.500H1.500ZM3.500 6H8.500",
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 1.6,
    }),
};
const SHAPE_OF = { new: "pending", pending: "pending", ready: "running" };
const LABEL_OF = {
  new: "Stored",
  pending: "Pending",
  ready: "Running",
  succeeded: "Succeeded",
  failed: "Failed",
  cancelled: "Cancelled",
};
const LETTERS = { pending: "◌", running: "●", succeeded: "✓", failed: "✕", cancelled: "⊟" };

export const shapeOf = (phase) => SHAPE_OF[phase] || phase;
export const labelOf = (phase) => LABEL_OF[phase] || phase;
export const letterOf = (phase) => LETTERS[shapeOf(phase)] || "";

export function mark(kind, size = 12) {
  return svg(
    "svg",
    {
      width: size,
      height: size,
      viewBox: "0 0 12 12",
      "aria-hidden": "true",
      class: `mark ${kind}`,
    },
    (SHAPES[kind] || SHAPES.pending)(),
  );
}

export function phaseBadge(name, { size = 12, hasLabel = true } = {}) {
  const kind = shapeOf(name);
  return h(
    "span",
    { class: `ph ${kind}` },
    mark(kind, size),
    hasLabel ? labelOf(name) : h("span", { class: "hidden" }, labelOf(name)),
  );
}

const pad = (n) => String(n).padStart(2, "0");

export function duration(seconds) {
  if (seconds === null || seconds === undefined || seconds < 0) return "–";
  const total = Math.floor(seconds);
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (total < 60) return `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} m ${pad(total % 60)} s`;
  if (total < 86400) return `${Math.floor(total / 3600)} h ${pad(Math.floor(total / 60) % 60)} m`;
  return `${Math.floor(total / 86400)} d ${pad(Math.floor(total / 3600) % 24)} h`;
}

export function clock(at, now) {
  if (at === null || at === undefined) return "–";
  const then = new Date(at * 1000),
    today = new Date(now * 1000);
  const time = `${pad(then.getHours())}:${pad(then.getMinutes())}:${pad(then.getSeconds())}`;
  if (then.toDateString() === today.toDateString()) return time;
  const day = `${pad(then.getMonth() + 1)}-${pad(then.getDate())} ${time.slice(0, 5)}`;
  return then.getFullYear() === today.getFullYear() ? day : `${then.getFullYear()}-${day}`;
}

export function timestamp(at, now, className) {
  if (at === null || at === undefined) return h("span", { class: className }, "–");
  const iso = new Date(at * 1000).toISOString();
  return h("time", { datetime: iso, title: iso, class: className }, clock(at, now));
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  for (const [unit, letter] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    if (size >= unit) return `${(value / (letter === "k" ? 1e3 : unit)).toPrecision(3)} ${letter}`;
  }
  if (Number.isInteger(value)) return String(value);
  return size < 1e-3 && size > 0 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, name] of [
    [2 ** 40, "TiB"],
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ]) {
    if (Math.abs(value) >= unit) return `${(value / unit).toPrecision(3)} ${name}`;
  }
  return `${value} B`;
}

export function button(text, onclick, extra = {}) {
  return h("button", { type: "button", onclick, ...extra }, text);
}

export function copyable(text) {
  const done = h("span", { class: "small dim", role: "status" });
  return h(
    "div",
    { class: "row" },
    button(
      "Copy",
      async () => {
        await navigator.clipboard.writeText(text);
        done.textContent = "copied";
      },
      { class: "mini" },
    ),
    done,
  );
}
