// The frame: signing in, addresses, the theme, the connection.

import { follow, forget, isSignedIn, send, signIn, state } from "./api.js";
import { button, clock, h, put } from "./dom.js";
import { showCompare } from "./compare.js";
import { showList } from "./list.js";
import { showTraining } from "./training.js";

const main = document.getElementById("main");
const live = document.getElementById("live");
const stale = document.getElementById("stale");
let view = null, shown = null;

const ROUTES = [
  [/^\/$/, "list", () => showList(main, go)],
  [/^\/t\/([^/]+)(?:\/r\/(\d+))?$/, "list", (name, rank) => showTraining(main, decodeURIComponent(name), rank, go)],
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
  const found = ROUTES.map(([pattern, nav, make]) => [location.pathname.match(pattern), nav, make]).find(([match]) => match);
  for (const link of document.querySelectorAll("[data-nav]")) {
    if (found && link.dataset.nav === found[1]) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!found) {
    document.title = "Not found · atoll";
    view?.close?.();
    put(main, h("h1", {}, "Not found"), h("p", {}, "There is no such page. ", h("a", { href: "/", "data-link": true }, "All trainings")));
    view = null;
    return;
  }
  // Another rank of the training that is shown is beside it: the page stays.
  if (found[2] === shown && view?.moved?.(...found[0].slice(1).map((each) => each && decodeURIComponent(each)))) return;
  view?.close?.();
  shown = found[2];
  view = shown(...found[0].slice(1));
  const scroll = history.state?.scroll;
  Promise.resolve(view.ready).then(() => { if (scroll) scrollTo(0, scroll); });
}

function signInPage(words) {
  // A link of `atoll ui` opened in this very tab changes only what is behind the "#".
  addEventListener("hashchange", () => location.reload(), { once: true });
  document.title = "Sign in · atoll";
  const field = h("input", { type: "password", id: "token", autocomplete: "off", "aria-label": "Token" });
  const trouble = h("p", { class: "trouble", role: "alert" }, words || "");
  const form = h("form", { class: "panel signin", onsubmit: async (event) => {
    event.preventDefault();
    try {
      await signIn({ token: field.value });
      location.replace("/");
    } catch (error) { trouble.textContent = error.message; }
  } },
  h("h1", {}, "Sign in"),
  h("p", {}, "In a shell on the machine that you use atoll from, run:"),
  h("pre", {}, "atoll ui"),
  h("p", {}, "It opens this page signed in. Or give a token here:"),
  h("div", { class: "row" }, field, h("button", { class: "primary" }, "Sign in")),
  trouble);
  put(main, form);
}

function connection(isLive, since, error) {
  if (error) { forget(); signInPage(error.message); }
  put(live, h("span", { class: isLive ? "dot on" : "dot" }), isLive ? "live" : "not connected");
  document.body.classList.toggle("is-stale", !isLive);
  stale.hidden = isLive;
  if (!isLive) stale.textContent = `Not connected since ${clock(since, since)}, trying again. What is shown may be old.`;
  view?.connected?.(isLive);
}

const KEYS = [["/", "filter, or search the log"], ["j k", "next, previous"], ["Enter", "open"], ["x", "select"], ["c", "compare what is selected"], ["g t", "all trainings"], ["1 … 7", "sections"], ["[ ]", "earlier, later"], ["0", "all of the time"], ["f", "follow the log"], ["n N", "next, previous match"], ["e", "to the cause"], ["t", "light or dark"], ["Escape", "back"]];
let pressed = "";

function keys() {
  const dialog = h("dialog", { "aria-labelledby": "keys-title" }, h("h2", { id: "keys-title" }, "Keys"), h("dl", { class: "keys" }, KEYS.map(([key, words]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, words)])), h("p", { class: "small dim" }, "No key acts on a training."), h("div", { class: "row end" }, button("Close", () => dialog.close(), { autofocus: true })));
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
    } catch (error) { signInPage(error.message); return; }
  }
  if (!isSignedIn()) { signInPage(""); return; }
  if (location.pathname === "/in") history.replaceState({}, "", "/");
  put(document.getElementById("namespace"), `namespace ${state.namespace} `, button("Sign out", async () => {
    await send("DELETE", "/ui/session");
    forget();
    location.replace("/in");
  }, { class: "mini quiet" }));
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-link]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    go(link.getAttribute("href"));
  });
  addEventListener("popstate", show);
  addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]") || event.target.matches?.("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "?") { keys(); return; }
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
