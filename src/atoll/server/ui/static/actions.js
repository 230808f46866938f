// Scale, cancel, delete, rerun: each asks first. The page changes only when the server reports it.

import { get, query, send, state } from "./api.js";
import { button, copyable, h, put } from "./dom.js";

const QUESTIONS = {
  cancel: (names) => [
    `Cancel ${names.join(", ")}?`,
    "Stops the ranks: SIGTERM first, SIGKILL after the grace. Keeps record and logs.",
    "Cancel the training",
  ],
  delete: (names) => [
    `Delete ${names.join(", ")}?`,
    "Stops the ranks and deletes record, logs and metrics for good.",
    "Delete",
  ],
};

function ask(title, body, verb, perform, { danger = false, check = () => true } = {}) {
  const result = h("p", { class: "trouble", role: "alert" });
  const doIt = button(
    verb,
    async () => {
      doIt.disabled = true;
      doIt.textContent = "requested…";
      try {
        await perform();
        dialog.close();
      } catch (error) {
        result.textContent = error.message;
        doIt.disabled = false;
        doIt.textContent = verb;
      }
    },
    { class: danger ? "danger" : "primary" },
  );
  const safe = button("Leave it", () => dialog.close(), { autofocus: true });
  const refresh = () => {
    doIt.disabled = !state.isLive || !check();
  };
  const dialog = h(
    "dialog",
    { "aria-labelledby": "ask-title", oninput: refresh },
    h("h2", { id: "ask-title" }, title),
    body,
    result,
    h("div", { class: "row end" }, safe, doIt),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  refresh();
  dialog.showModal();
  return dialog;
}

export function act(kind, names, { isRunning = false } = {}) {
  const [title, text, verb] = QUESTIONS[kind](names);
  const needsName = kind === "delete" && isRunning && names.length === 1;
  const typed = h("input", {
    type: "text",
    "aria-label": "Name of the training",
    autocomplete: "off",
  });
  const body = h(
    "div",
    {},
    h("p", {}, text),
    needsName ? h("label", {}, `It is running. Type its name (${names[0]}): `, typed) : null,
  );
  ask(
    title,
    body,
    verb,
    async () => {
      for (const name of names) {
        const path = `/v1/trainings/${encodeURIComponent(name)}`;
        if (kind === "cancel") await send("POST", `${path}/cancel`);
        else await send("DELETE", path);
      }
    },
    { danger: true, check: () => !needsName || typed.value === names[0] },
  );
}

export function rerun(page, go) {
  const name = page.row.name;
  const field = h("input", {
    type: "text",
    "aria-label": "Name of the new training",
    autocomplete: "off",
    placeholder: `${name}-r2`,
  });
  const key = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
  const body = h(
    "div",
    {},
    h("p", {}, "Starts a new training with a copy of this spec and code. This one stays as it is."),
    h("p", {}, h("code", {}, page.command)),
    h("label", {}, "Name (optional): ", field),
  );
  return ask(`Run ${name} again?`, body, "Run it again", async () => {
    const answer = await send(
      "POST",
      `/v1/trainings/${encodeURIComponent(name)}/rerun`,
      field.value.trim() ? { name: field.value.trim() } : {},
      { key },
    );
    go(`/t/${encodeURIComponent((await answer.json()).spec.name)}`);
  });
}

// What `atoll stacks` prints: of ranks that run, or what atoll took by itself before the end.
export async function showStacks(name, uid, { rank = null, isOver = false } = {}) {
  const title = rank === null ? `Stacks of ${name}` : `Stacks of rank ${rank} of ${name}`;
  const body = h("div", { role: "status" }, "Reading the stacks…");
  const dialog = h(
    "dialog",
    { class: "wide", "aria-labelledby": "stacks-title" },
    h("h2", { id: "stacks-title" }, title),
    body,
    h(
      "div",
      { class: "row end" },
      button("Close", () => dialog.close(), { autofocus: true }),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  const path = `/v1/trainings/${encodeURIComponent(name)}/stacks`;
  try {
    const stacks = isOver
      ? await get(`${path}${query({ uid, rank })}`)
      : await (
          await send("POST", `${path}${query({ uid })}`, { ranks: rank === null ? [] : [rank] })
        ).json();
    put(body, stacksText(stacks, isOver));
  } catch (error) {
    put(body, h("p", { class: "trouble", role: "alert" }, error.message));
  }
}

function stacksText({ items, folded, message }, isOver) {
  if (!folded.length)
    return h("p", {}, isOver ? "atoll took no stacks of it before it ended." : "No stacks.");
  const causes = new Map(items.filter((one) => one.cause).map((one) => [one.cause, one.rank]));
  const text = [
    ...folded.map((group) => group.message),
    ...[...causes].map(([cause, rank]) => `taken because ${cause} (rank ${rank})`),
    ...folded
      .filter((group) => group.stack?.length)
      .flatMap((group) => ["", `${group.message}:`, ...group.stack.map((line) => `  ${line}`)]),
  ].join("\n");
  return [
    message ? h("p", { class: "dim" }, message) : null,
    h("pre", { tabindex: 0, role: "region", "aria-label": "Stacks" }, text),
    copyable(text),
  ];
}

const span = (first, end) => (first + 1 < end ? `ranks ${first} to ${end - 1}` : `rank ${first}`);

export function scale(page, grace) {
  const row = page.row;
  const field = h("input", {
    type: "number",
    value: row.target,
    min: row.min,
    max: page.worldMax,
    "aria-label": "Number of ranks",
  });
  const effect = h("p", { class: "soft" });
  const describe = () => {
    const target = Number(field.value);
    if (!Number.isInteger(target) || target < row.min || target > page.worldMax)
      effect.textContent = `Between ${row.min} and ${page.worldMax}.`;
    else if (target < row.target)
      effect.textContent = `Stops ${span(target, row.target)}, ${grace} s grace.`;
    else if (target > row.target) effect.textContent = `Starts ${span(row.target, target)}.`;
    else effect.textContent = "No change.";
  };
  const by = (step) =>
    button(
      step > 0 ? "+" : "−",
      () => {
        field.value = Number(field.value) + step;
        field.dispatchEvent(new Event("input", { bubbles: true }));
      },
      { class: "icon", "aria-label": step > 0 ? "One more" : "One less" },
    );
  const dialog = ask(
    `Scale ${row.name}`,
    h(
      "div",
      {},
      h(
        "div",
        { class: "row" },
        by(-1),
        field,
        by(1),
        h("span", { class: "dim" }, `min ${row.min}, max ${page.worldMax}`),
      ),
      effect,
    ),
    "Scale",
    () =>
      send("POST", `/v1/trainings/${encodeURIComponent(row.name)}/scale`, {
        target: Number(field.value),
      }),
    {
      check: () => {
        describe();
        const target = Number(field.value);
        return (
          Number.isInteger(target) &&
          target >= row.min &&
          target <= page.worldMax &&
          target !== row.target
        );
      },
    },
  );
  put(effect);
  describe();
  return dialog;
}
