// The frame of every page: sign-in, routes, theme, keys, connection.

import { clearSession, follow, isSignedIn, send, signIn, state } from "./api.js";
import { button, clock, h, put } from "./dom.js";
import { showCompare } from "./compare.js";
import { showList } from "./list.js";
import { showTraining } from "./training.js";

const main = document.getElementById("main");
const live = document.getElementById("live");
const stale = document.getElementById("stale");
let view = null,
  currentRoute = null;

const ROUTES = [
  [/^\/$/, "list", () => showList(main, go)],
  [
    /^\/t\/([^/]+)(?:\/r\/(\d+))?$/,
    "list",
    (name, rank) => showTraining(main, decodeURIComponent(name), rank, go),
  ],
  [/^\/compare$/, "compare", () => showCompare(main, go)],
];

export function go(address, { replace = false } = {}) {
  if (replace) history.replaceState({}, "", address);
  else {
    history.replaceState({ ...history.state, scroll: scrollY }, "");
    history.pushState({}, "", address);
  }
  show();
}

function show() {
  const route = ROUTES.map(([pattern, nav, make]) => [
    location.pathname.match(pattern),
    nav,
    make,
  ]).find(([match]) => match);
  for (const link of document.querySelectorAll("[data-nav]")) {
    if (route && link.dataset.nav === route[1]) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!route) {
    document.title = "Not found · atoll";
    view?.close?.();
    put(
      main,
      h("h1", {}, "Not found"),
      h(
        "p",
        {},
        "There is no such page. ",
        h("a", { href: "/", "data-link": true }, "All trainings"),
      ),
    );
    view = null;
    return;
  }
  // Another rank of the same training opens in its side panel: the page stays.
  if (
    route[2] === currentRoute &&
    view?.moved?.(...route[0].slice(1).map((each) => each && decodeURIComponent(each)))
  )
    return;
  view?.close?.();
  currentRoute = route[2];
  view = currentRoute(...route[0].slice(1));
  const scroll = history.state?.scroll;
  Promise.resolve(view.ready).then(() => {
    if (scroll) scrollTo(0, scroll);
  });
}

function signInPage(message) {
  // A link of `atoll ui` that is opened in this tab changes only the part after the "#".
  addEventListener("hashchange", () => location.reload(), { once: true });
  // Another tab has signed in: this one shows its page again.
  addEventListener("storage", (event) => {
    if (event.key === "atoll-csrf" && event.newValue) location.reload();
  });
  document.title = "Sign in · atoll";
  const field = h("input", {
    type: "password",
    id: "token",
    autocomplete: "off",
    "aria-label": "Token",
  });
  const trouble = h("p", { class: "trouble", role: "alert" }, message || "");
  const form = h(
    "form",
    {
      class: "panel signin",
      onsubmit: async (event) => {
        event.preventDefault();
        try {
          await signIn({ token: field.value });
          location.replace("/");
        } catch (error) {
          trouble.textContent = error.message;
        }
      },
    },
    h("h1", {}, "Sign in"),
    h("p", {}, "Run this in a shell on the machine where you use atoll:"),
    h("pre", {}, "atoll ui"),
    h("p", {}, "It signs in every tab of this browser. Or enter a token here:"),
    h("div", { class: "row" }, field, h("button", { class: "primary" }, "Sign in")),
    trouble,
  );
  put(main, form);
}

function connection(isLive, since, error) {
  if (error) {
    clearSession();
    view?.close?.();
    view = null;
    put(live, h("span", { class: "dot" }), "signed out");
    stale.hidden = true;
    signInPage("This session has ended: run `atoll ui`. This page then continues by itself.");
    return;
  }
  put(live, h("span", { class: isLive ? "dot on" : "dot" }), isLive ? "live" : "not connected");
  document.body.classList.toggle("is-stale", !isLive);
  stale.hidden = isLive;
  if (!isLive)
    put(
      stale,
      `Not connected since ${clock(since, since)}, trying again. `,
      "This page may be old.",
    );
  view?.connected?.(isLive);
}

const KEYS = [
  ["/", "filter, or search the log"],
  ["j k", "next, previous"],
  ["Enter", "open"],
  ["x", "select"],
  ["c", "compare the selected trainings"],
  ["g t", "all trainings"],
  ["1 … 7", "sections"],
  ["[ ]", "earlier, later"],
  ["0", "whole span of time"],
  ["← →", "move the cursor of a focused chart"],
  ["f", "follow the log"],
  ["n N", "next, previous match"],
  ["e", "to the cause"],
  ["t", "light or dark"],
  ["Escape", "back"],
];
let pressed = "";

function keys() {
  const dialog = h(
    "dialog",
    { "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keys"),
    h(
      "dl",
      { class: "keys" },
      KEYS.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]),
    ),
    h("p", { class: "small dim" }, "No key acts on a training."),
    h(
      "div",
      { class: "row end" },
      button("Close", () => dialog.close(), { autofocus: true }),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

async function start() {
  document.getElementById("theme").addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("atoll-theme", next);
    view?.themed?.();
  });
  if (location.pathname === "/in" && location.hash.length > 1) {
    const code = location.hash.slice(1);
    history.replaceState({}, "", "/in");
    try {
      await signIn({ code });
      location.replace("/");
      return;
    } catch (error) {
      signInPage(error.message);
      return;
    }
  }
  if (!isSignedIn()) {
    signInPage("");
    return;
  }
  if (location.pathname === "/in") history.replaceState({}, "", "/");
  put(
    document.getElementById("namespace"),
    `namespace ${state.namespace} `,
    button(
      "Sign out",
      async () => {
        await send("DELETE", "/ui/session");
        clearSession();
        location.replace("/in");
      },
      { class: "mini muted" },
    ),
  );
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-link]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    go(link.getAttribute("href"));
  });
  addEventListener("popstate", show);
  addEventListener("keydown", (event) => {
    if (
      document.querySelector("dialog[open]") ||
      event.target.matches?.("input, textarea, select") ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey
    )
      return;
    if (event.key === "?") {
      keys();
      return;
    }
    const isSecond = event.key === "t" && pressed === "g";
    pressed = event.key;
    if (isSecond) go("/");
    else if (event.key === "g") return;
    else if (event.key === "t") document.getElementById("theme").click();
    else view?.key?.(event);
  });
  show();
  follow((names) => view?.changed?.(names), connection);
}

start();
