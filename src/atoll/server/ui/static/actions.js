// Scale, cancel, delete: each with a question first. Nothing is drawn before the server says so.

import { send, state } from "./api.js";
import { button, h, put } from "./dom.js";

const WORDS = {
  cancel: (names) => [`Cancel ${names.join(", ")}?`, "The ranks are stopped, politely at first. Record and logs stay.", "Cancel the training"],
  delete: (names) => [`Delete ${names.join(", ")}?`, "The ranks are stopped; record, logs and series are removed for good.", "Delete"],
};

function ask(title, body, verb, perform, { danger = false, check = () => true } = {}) {
  const result = h("p", { class: "trouble", role: "alert" });
  const doIt = button(verb, async () => {
    doIt.disabled = true;
    doIt.textContent = "asked…";
    try {
      await perform();
      dialog.close();
    } catch (error) {
      result.textContent = error.message;
      doIt.disabled = false;
      doIt.textContent = verb;
    }
  }, { class: danger ? "danger" : "primary" });
  const safe = button("Leave it", () => dialog.close(), { autofocus: true });
  const refresh = () => { doIt.disabled = !state.isLive || !check(); };
  const dialog = h("dialog", { "aria-labelledby": "ask-title", oninput: refresh }, h("h2", { id: "ask-title" }, title), body, result, h("div", { class: "row end" }, safe, doIt));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  refresh();
  dialog.showModal();
  return dialog;
}

export function act(kind, names, { isRunning = false } = {}) {
  const [title, words, verb] = WORDS[kind](names);
  const needsName = kind === "delete" && isRunning && names.length === 1;
  const typed = h("input", { type: "text", "aria-label": "Name of the training", autocomplete: "off" });
  const body = h("div", {}, h("p", {}, words), needsName ? h("label", {}, `It is running. Type its name (${names[0]}): `, typed) : null);
  ask(title, body, verb, async () => {
    for (const name of names) {
      const path = `/v1/trainings/${encodeURIComponent(name)}`;
      if (kind === "cancel") await send("POST", `${path}/cancel`);
      else await send("DELETE", path);
    }
  }, { danger: true, check: () => !needsName || typed.value === names[0] });
}

export function rerun(page, go) {
  const name = page.row.name;
  const field = h("input", { type: "text", "aria-label": "Name of the new training", autocomplete: "off", placeholder: `${name}-r2` });
  const key = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const body = h("div", {}, h("p", {}, "A new training with the same spec and code, which the control plane copies. This one stays as it is."),
    h("p", {}, h("code", {}, page.command)), h("label", {}, "Name, if not made from this one: ", field));
  return ask(`Run ${name} again?`, body, "Run it again", async () => {
    const answer = await send("POST", `/v1/trainings/${encodeURIComponent(name)}/rerun`, field.value.trim() ? { name: field.value.trim() } : {}, { key });
    go(`/t/${encodeURIComponent((await answer.json()).spec.name)}`);
  });
}

export function scale(page, grace) {
  const row = page.row;
  const field = h("input", { type: "number", value: row.target, min: row.min, max: page.worldMax, "aria-label": "Number of ranks" });
  const what = h("p", { class: "soft" });
  const tell = () => {
    const target = Number(field.value);
    if (!Number.isInteger(target) || target < row.min || target > page.worldMax) what.textContent = `Between ${row.min} and ${page.worldMax}.`;
    else if (target < row.target) what.textContent = `Ranks ${target}${target + 1 < row.target ? ` to ${row.target - 1}` : ""} are stopped, ${grace} s grace.`;
    else if (target > row.target) what.textContent = `Ranks ${row.target}${row.target + 1 < target ? ` to ${target - 1}` : ""} are started.`;
    else what.textContent = "As it is.";
  };
  const by = (step) => button(step > 0 ? "+" : "−", () => { field.value = Number(field.value) + step; field.dispatchEvent(new Event("input", { bubbles: true })); }, { class: "icon", "aria-label": step > 0 ? "One more" : "One less" });
  const dialog = ask(`Scale ${row.name}`, h("div", {}, h("div", { class: "row" }, by(-1), field, by(1), h("span", { class: "dim" }, `min ${row.min}, max ${page.worldMax}`)), what), "Scale",
    () => send("POST", `/v1/trainings/${encodeURIComponent(row.name)}/scale`, { target: Number(field.value) }),
    { check: () => { tell(); const target = Number(field.value); return Number.isInteger(target) && target >= row.min && target <= page.worldMax && target !== row.target; } });
  put(what);
  tell();
  return dialog;
}
