// All trainings, in groups: those that run, recent failures, those that have ended.

import { get, now, query } from "./api.js";
import { act } from "./actions.js";
import { markSeen, seenFailures } from "./seen.js";
import {
  button,
  bytes,
  duration,
  h,
  mark,
  number,
  patch,
  phaseBadge,
  put,
  shapeOf,
  svg,
  timestamp,
} from "./dom.js";

const PAGE = 60;
const FAILED = "Failed in the last 24 hours";
const PAUSE_MS = 700; // between two reads of the list, however often it changes: people see no more
const CHIPS = [
  ["", "All"],
  ["attention", "Needs attention"],
  ["ready", "Running"],
  ["pending", "Pending"],
  ["failed", "Failed"],
  ["succeeded", "Succeeded"],
  ["cancelled", "Cancelled"],
];
const COLUMNS = [
  ["name", "Name", "nm"],
  [null, "What it is doing", "sy"],
  ["world", "World", "wd"],
  [null, "Round", "rd r"],
  [null, "Loss", "ls"],
  ["ran", "Ran", "rn r"],
  ["where", "Where", "wh"],
  ["since", "Since", "sn r"],
];

export function showList(main, go) {
  document.title = "Trainings · atoll";
  const params = new URLSearchParams(location.search);
  const filters = {
    q: params.get("q") || "",
    phase: params.get("phase") || "",
    sort: params.get("sort") || "",
    offset: Number(params.get("offset") || 0),
  };
  const selected = new Set();
  const ended = new AbortController();
  let page = null,
    waiting = null,
    again = false,
    soon = null,
    read = 0,
    hasSeen = false; // shows failures that were opened
  const open = new Set(); // groups whose trainings are shown

  const search = h("input", {
    type: "search",
    value: filters.q,
    placeholder: "Filter: name, host, reason, phase:failed",
    "aria-label": "Filter trainings",
    oninput: () => later(() => change({ q: search.value, offset: 0 })),
  });
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Phase" });
  const heads = h(
    "tr",
    {},
    h("th", { class: "ck" }, h("span", { class: "hidden" }, "Select")),
    COLUMNS.map(([key, label, cls]) => {
      if (!key) return h("th", { class: cls, scope: "col" }, label);
      return h(
        "th",
        { class: cls, scope: "col", "data-sort": key },
        button(label, () =>
          change({ sort: filters.sort === `-${key}` ? key : `-${key}`, offset: 0 }),
        ),
      );
    }),
  );
  const body = h("tbody", {});
  const foot = h("div", { class: "foot" });
  const pick = h("div", {
    class: "pick",
    hidden: true,
    role: "group",
    "aria-label": "Selected trainings",
  });
  const table = h(
    "table",
    { class: "list" },
    h("caption", { class: "hidden" }, "Trainings"),
    h("thead", {}, heads),
    body,
  );
  const panel = h("div", { class: "panel" }, table, foot);
  const use = h("p", { class: "use small soft", hidden: true });
  put(
    main,
    h("h1", { class: "hidden" }, "Trainings"),
    h("div", { class: "bar" }, search, chips),
    use,
    panel,
    pick,
  );

  let timer = null;
  const later = (action) => {
    clearTimeout(timer);
    timer = setTimeout(action, 200);
  };

  function change(values) {
    Object.assign(filters, values);
    history.replaceState(
      history.state,
      "",
      `/${query({ ...filters, offset: filters.offset || "" })}`,
    );
    return load();
  }

  async function load() {
    if (waiting) {
      again = true;
      return waiting;
    }
    waiting = (async () => {
      try {
        read = performance.now();
        page = await get(
          `/ui/rows${query({ ...filters, limit: PAGE, open: [...open] })}`,
          ended.signal,
        );
        draw();
      } catch (error) {
        if (error.name !== "AbortError") trouble(error);
      }
    })();
    await waiting;
    waiting = null;
    if (again) {
      again = false;
      return load();
    }
  }

  function trouble(error) {
    put(
      foot,
      h("span", { class: "trouble", role: "alert" }, error.message),
      button("Try again", load, { class: "mini" }),
    );
  }

  function draw() {
    const { totals } = page;
    const counts = { "": totals.all, attention: totals.needsAttention, ...totals.byPhase };
    put(
      chips,
      CHIPS.map(([key, label]) =>
        button(
          [
            key && key !== "attention" ? mark(shapeOf(key)) : null,
            label,
            h("b", {}, (counts[key] || 0).toLocaleString("en")),
          ],
          () => change({ phase: key, offset: 0 }),
          { "aria-pressed": String(filters.phase === key), "data-phase": key || "all" },
        ),
      ),
    );
    use.hidden = !page.resources.length;
    use.textContent = `Ranks on this machine asked for ${page.resources.map(useOf).join(", ")}.`;
    for (const head of heads.querySelectorAll("[data-sort]")) {
      const key = head.dataset.sort;
      if (filters.sort.replace("-", "") === key)
        head.setAttribute("aria-sort", filters.sort.startsWith("-") ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    patch(
      body,
      arranged(),
      (item) =>
        item.uid
          ? `row:${item.uid}`
          : item.members
            ? `members:${item.members}`
            : `group:${item.group}`,
      (item) => JSON.stringify([item, selected.has(item.name)]),
      (item) => (item.uid ? line(item) : item.members ? groupLine(item) : heading(item)),
    );
    if (!page.items.length)
      put(
        body,
        h(
          "tr",
          {},
          h(
            "td",
            { colspan: COLUMNS.length + 1, class: "empty" },
            totals.all ? "No training matches." : emptyState(),
          ),
        ),
      );
    const first = page.matched ? filters.offset + 1 : 0,
      last = filters.offset + page.items.length;
    put(
      foot,
      h(
        "span",
        { role: "status" },
        [first, "to", last, "of", page.matched].map((each) => each.toLocaleString("en")).join(" "),
      ),
      button("Newer", () => change({ offset: Math.max(0, filters.offset - PAGE) }), {
        class: "mini",
        disabled: filters.offset === 0,
      }),
      button("Older", () => change({ offset: filters.offset + PAGE }), {
        class: "mini",
        disabled: last >= page.matched,
      }),
      h(
        "span",
        { class: "push wide" },
        [
          ["/", "filter"],
          ["j", ""],
          ["k", "move"],
          ["x", "select"],
          ["c", "compare"],
          ["?", "all keys"],
        ].map(([key, label]) => [h("kbd", {}, key), ` ${label} `]),
      ),
      h("code", { class: "wide" }, shell()),
    );
    drawPick();
  }

  // The command that prints the same list.
  function shell() {
    const sort = {
      "": "",
      since: "age",
      "-since": "age",
      name: "name",
      "-name": "-name",
      phase: "phase",
      "-phase": "-phase",
      ran: "ran",
      "-ran": "-ran",
      world: "ready",
      "-world": "-ready",
    }[filters.sort];
    return [
      "atoll ps",
      filters.phase && filters.phase !== "attention" ? `--phase ${filters.phase}` : "",
      sort ? `--sort ${sort}` : "",
    ]
      .filter(Boolean)
      .join(" ");
  }

  function emptyState() {
    return h(
      "div",
      {},
      h("p", {}, "No trainings yet. This page shows one as soon as you start it:"),
      h("pre", {}, "atoll run -n 4 -- python train.py"),
    );
  }

  const isLive = (row) => ["new", "pending", "ready"].includes(row.phase);
  const isOdd = (row) =>
    row.phase === "failed"
      ? page.now - row.since < 86400
      : row.isStalled ||
        (row.phase !== "ready" && isLive(row) && (page.now - row.since > 300 || row.isBelow));
  const groupOf = (row) => (isLive(row) ? "Running" : isOdd(row) ? FAILED : "Ended");

  // Rows with a heading before each group. Failures that were opened are folded into theirs.
  // Trainings with the same label `group` are one row, where the first of them would be: with what
  // runs if one of them runs, else with failures if one has failed.
  function arranged() {
    if (filters.sort) return page.items;
    const items = [],
      seen = seenFailures();
    let group = null,
      label = "", // of the group that the rows belong to
      isFolded = false;
    for (const row of page.items) {
      if (label && row.group === label) {
        if (!isFolded) items.push(row);
        continue;
      }
      label = Object.hasOwn(page.groups, row.group) ? row.group : "";
      const own = groupOf(row);
      if (own !== group?.group) {
        group = { group: own, folded: 0 };
        items.push(group);
      }
      const failed = own === FAILED && !hasSeen && !isNarrowed() ? failuresOf(row) : [];
      isFolded = failed.length > 0 && failed.every((uid) => seen.has(uid));
      if (isFolded) group.folded += failed.length;
      else {
        const isOpen = open.has(label);
        if (label) items.push({ members: label, isOpen, phases: page.groups[label].byPhase });
        if (!label || isOpen) items.push(row);
      }
    }
    return items;
  }

  const failuresOf = (row) => page.groups[row.group]?.failed ?? [row.uid];

  // Compares as many trainings of a group as the page for it takes.
  async function compareGroup(name) {
    const { items } = await get(
      `/ui/rows${query({ group: name, sort: "name", limit: 200 })}`,
      ended.signal,
    );
    go(`/compare${query({ t: items.map((row) => row.name) })}`);
  }

  function groupLine({ members, isOpen, phases }) {
    const count = Object.values(phases).reduce((sum, each) => sum + each, 0);
    return h(
      "tr",
      {},
      h("td", { class: "ck" }),
      h(
        "td",
        { class: "nm" },
        button(
          `${isOpen ? "▾" : "▸"} ${members}`,
          () => {
            if (isOpen) open.delete(members);
            else open.add(members);
            load();
          },
          { class: "mini muted", "aria-expanded": String(isOpen), "data-focus": "open" },
        ),
      ),
      h(
        "td",
        { class: "sy", colspan: COLUMNS.length - 1 },
        `${count.toLocaleString("en")} trainings: `,
        Object.entries(phases)
          .map(([phase, each]) => `${each} ${phase === "ready" ? "running" : phase}`)
          .join(", "),
        " ",
        button("Compare", () => compareGroup(members).catch(trouble), {
          class: "mini",
          "aria-label": `Compare ${members}`,
        }),
      ),
    );
  }
  const isNarrowed = () => Boolean(filters.q || filters.phase);

  function heading({ group, folded }) {
    const failed = page.items.filter((row) => groupOf(row) === FAILED).flatMap(failuresOf);
    const unseen = failed.filter((uid) => !seenFailures().has(uid));
    return h(
      "tr",
      { class: "group" },
      h(
        "td",
        { colspan: COLUMNS.length + 1 },
        group,
        group === FAILED && !isNarrowed()
          ? [
              folded || hasSeen
                ? button(
                    hasSeen ? "Hide what you have seen" : `${folded} that you have seen`,
                    () => {
                      hasSeen = !hasSeen;
                      draw();
                    },
                    { class: "mini muted", "data-focus": "seen" },
                  )
                : null,
              unseen.length
                ? button(
                    "Mark all as seen",
                    () => {
                      markSeen(...unseen);
                      draw();
                    },
                    { class: "mini muted", "data-focus": "mark" },
                  )
                : null,
            ]
          : null,
      ),
    );
  }

  function line(row) {
    const ran = row.startedAt === null ? null : (row.endedAt || page.now) - row.startedAt;
    const address = `/t/${encodeURIComponent(row.name)}${query({ uid: row.uid })}`;
    return h(
      "tr",
      { class: selected.has(row.name) ? "sel" : "" },
      h(
        "td",
        { class: "ck" },
        h("input", {
          type: "checkbox",
          checked: selected.has(row.name),
          "aria-label": `Select ${row.name}`,
          "data-focus": "ck",
          onchange: (event) => {
            if (event.target.checked) selected.add(row.name);
            else selected.delete(row.name);
            draw();
          },
        }),
      ),
      h(
        "td",
        { class: "nm" },
        phaseBadge(row.phase, { hasLabel: false }),
        " ",
        h(
          "a",
          {
            class: "name",
            href: address,
            "data-link": true,
            "data-focus": "name",
            title: row.displayName,
          },
          row.displayName,
        ),
      ),
      h(
        "td",
        { class: "sy", title: `${row.cause} ${row.sentence}` },
        row.isBelow || (isLive(row) && isOdd(row)) ? triangle() : null,
        row.isBelow ? h("span", { class: "warn" }, "Below minimum: ") : null,
        row.cause
          ? [h("b", { class: row.phase === "failed" ? "failed" : "warn" }, row.cause), " "]
          : null,
        row.sentence,
        row.restarts
          ? h("span", { class: "dim" }, ` · ${row.restarts} restart${row.restarts > 1 ? "s" : ""}`)
          : null,
      ),
      h("td", { class: "wd" }, world(row)),
      h("td", { class: "rd r num" }, row.round ?? ""),
      h(
        "td",
        { class: "ls" },
        row.loss === null
          ? null
          : h(
              "span",
              { class: "lossv" },
              spark(row.spark, row.phase),
              h("span", { class: "num" }, number(row.loss)),
            ),
      ),
      h("td", { class: "rn r num" }, ran === null ? "–" : duration(ran)),
      h("td", { class: "wh" }, row.where),
      h("td", { class: "sn r num" }, timestamp(row.since, page.now)),
    );
  }

  function drawPick() {
    for (const name of selected)
      if (!page.items.some((row) => row.name === name)) selected.delete(name);
    pick.hidden = selected.size === 0;
    const names = [...selected];
    put(
      pick,
      h("span", {}, h("b", {}, names.length), " selected"),
      button("Compare", () => go(`/compare${query({ t: names })}`), {
        class: "primary",
        disabled: names.length < 2,
      }),
      button("Cancel…", () => act("cancel", names), {}),
      button("Delete…", () => act("delete", names), { class: "danger" }),
      button("Clear", () => {
        selected.clear();
        draw();
      }),
    );
  }

  let cursor = -1;
  const ticker = setInterval(() => {
    // What ranks asked for is released a little after they end, which changes no training.
    if (page?.resources.some((each) => each.used)) load();
    else if (page && page.items.some((row) => row.startedAt && !row.endedAt)) {
      page.now = now();
      draw();
    }
  }, 5000);
  return {
    ready: load(),
    changed: () => {
      soon ??= setTimeout(
        () => {
          soon = null;
          load();
        },
        Math.max(0, read + PAUSE_MS - performance.now()),
      );
    },
    close() {
      ended.abort();
      clearInterval(ticker);
      clearTimeout(timer);
      clearTimeout(soon);
    },
    key(event) {
      const links = [...body.querySelectorAll("a.name")];
      if (event.key === "/") {
        event.preventDefault();
        search.focus();
      } else if (event.key === "j" || event.key === "k") {
        const here = links.indexOf(
          document.activeElement?.closest?.("tr")?.querySelector("a.name"),
        );
        cursor = Math.max(
          0,
          Math.min(links.length - 1, (here < 0 ? cursor : here) + (event.key === "j" ? 1 : -1)),
        );
        links[cursor]?.focus();
      } else if (event.key === "x")
        (body.contains(document.activeElement) ? document.activeElement : links[cursor])
          ?.closest("tr")
          ?.querySelector("input")
          ?.click();
      else if (event.key === "c" && selected.size > 1) go(`/compare${query({ t: [...selected] })}`);
    },
  };
}

const LABELS = { cpu: "CPUs", gpus: "GPUs" };

// `3 of 4 slots (1 free)`
function useOf({ name, used, total }) {
  const text = name === "memory" ? bytes : (amount) => Number(amount.toFixed(3));
  const free = text(Math.max(0, total - used));
  return `${text(used)} of ${text(total)} ${LABELS[name] || name} (${free} free)`;
}

const triangle = () =>
  svg(
    "svg",
    {
      width: 13,
      height: 12,
      viewBox: "0 0 13 12",
      class: "tri",
      role: "img",
      "aria-label": "Warning",
    },
    svg("path", {
      d: "M6.5 1 12.3 11H.7Z",
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 1.4,
    }),
    svg("path", {
      d: "M6.5 4.500V7.500M6.500 8.800V10",
      stroke: "currentColor",
      "stroke-width": 1.4,
    }),
  );

export function world(row) {
  const share = row.target ? Math.min(1, row.ready / row.target) : 0,
    minimum = row.target ? row.min / row.target : 0;
  const kind =
    row.phase === "ready"
      ? "running"
      : row.phase === "succeeded"
        ? "succeeded"
        : row.phase === "pending"
          ? "pending"
          : "cancelled";
  return h(
    "span",
    { class: "world", title: `${row.ready} of ${row.target} ranks ready, min ${row.min}` },
    svg(
      "svg",
      { width: 64, height: 12, "aria-hidden": "true", class: kind },
      svg("rect", {
        x: 0.5,
        y: 3.5,
        width: 63,
        height: 5,
        rx: 2,
        fill: "none",
        stroke: "var(--edge)",
      }),
      svg("rect", { x: 0, y: 3, width: 64 * share, height: 6, rx: 2, fill: "currentColor" }),
      svg("path", { d: `M${Math.round(63 * minimum) + 0.5} 1V11`, stroke: "var(--ink)" }),
    ),
    h("span", { class: "num" }, `${row.ready}/${row.target}`),
  );
}

export function spark(values, phaseName) {
  const low = Math.min(...values),
    high = Math.max(...values),
    span = high - low || 1;
  const points = values.map((value, at) => {
    const x = values.length > 1 ? (at / (values.length - 1)) * 70 + 1 : 36;
    return `${x},${(15 - ((value - low) / span) * 13).toFixed(1)}`;
  });
  return svg(
    "svg",
    {
      width: 72,
      height: 17,
      "aria-hidden": "true",
      class: phaseName === "failed" ? "failed" : "running",
    },
    svg("polyline", {
      points: points.join(" "),
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 1.4,
    }),
  );
}
