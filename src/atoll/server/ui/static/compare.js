// Compares two to eight trainings: what differs in their specs, and one metric of each as a line.

import { get, query } from "./api.js";
import { button, clock, duration, h, number, phaseBadge, put, svg } from "./dom.js";

const TONES = [
  "--running",
  "--failed",
  "--succeeded",
  "--pending",
  "--c5",
  "--cancelled",
  "--c6",
  "--ink",
];
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3], [4, 4], [10, 4], [1, 3], [6, 2, 2, 2]];
const AXES = ["step", "time", "tokens"];

export function showCompare(main, go) {
  document.title = "Compare · atoll";
  const params = new URLSearchParams(location.search),
    names = params.getAll("t").slice(0, 8);
  const ended = new AbortController();
  let axis = AXES.includes(params.get("x")) ? params.get("x") : "step",
    metric = params.get("s") || "loss",
    plot = null,
    runs = [];
  let hasSame = false;
  const fold = h("span", { class: "push" });
  const add = h("input", {
    type: "text",
    "aria-label": "Name of a training to add",
    placeholder: "name of a training",
    list: "known",
  });
  const known = h("datalist", { id: "known" });
  const table = h("div", {
      class: "scroll",
      tabindex: 0,
      role: "region",
      "aria-label": "Differences",
    }),
    holder = h("div", { class: "holder", role: "img" }),
    legend = h("ul", { class: "legend" }),
    note = h("p", { class: "small dim", role: "status" });
  const pick = h("select", {
    class: "mini",
    "aria-label": "Metric",
    onchange: () => change({ s: pick.value }),
  });
  const axes = h(
    "select",
    { class: "mini", "aria-label": "Horizontal axis", onchange: () => change({ x: axes.value }) },
    AXES.map((each) => h("option", { value: each }, each)),
  );
  put(
    main,
    h("h1", {}, "Compare"),
    h(
      "form",
      {
        class: "row",
        onsubmit: (event) => {
          event.preventDefault();
          if (add.value) go(`/compare${query({ t: [...names, add.value], s: metric, x: axis })}`);
        },
      },
      add,
      known,
      h("button", {}, "Add"),
    ),
    h(
      "section",
      { class: "panel", "aria-labelledby": "h-diff" },
      h("header", {}, h("h2", { id: "h-diff" }, "What differs"), fold),
      h("div", { class: "body" }, table),
    ),
    h(
      "section",
      { class: "panel", "aria-labelledby": "h-metric" },
      h("header", {}, h("h2", { id: "h-metric" }, "Metric"), pick, axes),
      h("div", { class: "body" }, holder, legend, note),
    ),
  );

  function change(values) {
    if (values.s) metric = values.s;
    if (values.x) axis = values.x;
    history.replaceState({}, "", `/compare${query({ t: names, s: metric, x: axis })}`);
    load();
  }

  async function load() {
    try {
      const rows = await get("/ui/rows?limit=200", ended.signal);
      put(
        known,
        rows.items.map((row) => h("option", { value: row.name })),
      );
      runs = await Promise.all(
        names.map(async (name) => {
          try {
            const page = await get(`/ui/page/${encodeURIComponent(name)}`, ended.signal);
            const path = `/v1/trainings/${encodeURIComponent(name)}/metrics`;
            let answer = await get(`${path}${query({ name: metric, rank: 0 })}`, ended.signal);
            if (!answer.items.length)
              answer = await get(`${path}${query({ name: metric })}`, ended.signal);
            const line = answer.items[0];
            const tokens =
              axis === "tokens" && line
                ? (await get(`${path}${query({ name: "tokens", rank: line.rank })}`, ended.signal))
                    .items[0]
                : null;
            return { name, page, line, tokens, names: page.metrics.map((each) => each.name) };
          } catch (error) {
            if (error.status !== 404) throw error;
            return { name, page: null };
          }
        }),
      );
      draw();
    } catch (error) {
      if (error.name !== "AbortError") note.textContent = error.message;
    }
  }

  function draw() {
    const all = [...new Set(runs.flatMap((run) => run.names || []))].sort();
    axes.value = axis;
    put(
      pick,
      (all.length ? all : [metric]).map((each) => h("option", { value: each }, each)),
    );
    pick.value = metric;
    const present = runs.filter((run) => run.page);
    const flat = present.map((run) => flatten(run.page.spec));
    const keys = [...new Set(flat.flatMap((each) => Object.keys(each)))]
      .filter((key) => key !== "name" && new Set(flat.map((each) => each[key])).size > 1)
      .sort();
    const same = [...new Set(flat.flatMap((each) => Object.keys(each)))]
      .filter((key) => key !== "name" && !keys.includes(key))
      .sort();
    put(
      fold,
      present.length > 1 && same.length
        ? button(
            hasSame ? "Only what differs" : `${same.length} fields that are the same`,
            () => {
              hasSame = !hasSame;
              draw();
            },
            { class: "mini" },
          )
        : null,
    );
    const facts = [
      ["phase", (run) => phaseBadge(run.page.row.phase)],
      [
        "ran",
        (run) =>
          run.page.row.startedAt === null
            ? "–"
            : duration((run.page.row.endedAt || run.page.now) - run.page.row.startedAt),
      ],
      [
        "last",
        (run) => (run.line?.mean.length ? number(run.line.mean[run.line.mean.length - 1]) : "–"),
      ],
      ["world", (run) => `${run.page.row.ready}/${run.page.row.target}`],
      ["restarts", (run) => run.page.row.restarts],
      ["since", (run) => clock(run.page.row.since, run.page.now)],
    ];
    put(
      table,
      names.length
        ? h(
            "table",
            {},
            h("caption", { class: "hidden" }, "Facts and differences"),
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                h("th", { scope: "col" }, "Fact"),
                present.map((run) =>
                  h(
                    "th",
                    { scope: "col" },
                    h(
                      "a",
                      { href: `/t/${encodeURIComponent(run.name)}`, "data-link": true },
                      run.name,
                    ),
                  ),
                ),
              ),
            ),
            h(
              "tbody",
              {},
              facts.map(([label, make]) =>
                h(
                  "tr",
                  {},
                  h("th", { scope: "row" }, label),
                  present.map((run) => h("td", {}, make(run))),
                ),
              ),
              keys.map((key) =>
                h(
                  "tr",
                  {},
                  h("th", { scope: "row" }, key),
                  flat.map((each) => h("td", { class: "mono" }, each[key] ?? "–")),
                ),
              ),
            ),
            same.length
              ? h(
                  "tbody",
                  { hidden: !hasSame },
                  same.map((key) =>
                    h(
                      "tr",
                      { class: "dim" },
                      h("th", { scope: "row" }, key),
                      flat.map((each) => h("td", { class: "mono" }, each[key] ?? "–")),
                    ),
                  ),
                )
              : null,
          )
        : h(
            "p",
            { class: "dim" },
            "Name two to eight trainings, or select them in the list and press c.",
          ),
    );
    if (present.length > 1 && !keys.length) note.textContent = "The specs do not differ.";
    drawLines(present);
  }

  const others = (run) => names.filter((name) => name !== run.name);
  const label = (run) => (run.page ? run.name : `${run.name} (no such training)`);

  function drawLines(present) {
    plot?.destroy();
    plot = null;
    const drawn = present.filter((run) => run.line?.at.length && (axis !== "tokens" || run.tokens)),
      without = runs.filter((run) => !drawn.includes(run));
    put(
      legend,
      drawn.map((run, at) =>
        h(
          "li",
          { class: `tone${at}` },
          svg(
            "svg",
            { width: 26, height: 8, "aria-hidden": "true" },
            svg("path", {
              d: "M0 4H26",
              stroke: "currentColor",
              "stroke-width": 2,
              "stroke-dasharray": DASHES[at].join(" "),
            }),
          ),
          run.name,
          button(
            "×",
            () => go(`/compare${query({ t: others(run), s: metric, x: axis })}`, { replace: true }),
            { class: "mini muted", "aria-label": `Remove ${run.name}` },
          ),
        ),
      ),
    );
    note.textContent = without.length
      ? `No ${metric}${axis === "tokens" ? " with tokens" : ""}: ${without.map(label).join(", ")}`
      : "";
    holder.setAttribute("aria-label", `${metric} of ${drawn.map((run) => run.name).join(", ")}`);
    if (!drawn.length) return;
    const tables = drawn.map((run) => {
      const xs =
          axis === "step"
            ? run.line.step
            : axis === "tokens"
              ? tokensAt(run)
              : run.line.at.map((at) => at - run.line.at[0]),
        pairs = new Map();
      xs.forEach((x, at) => {
        if (x !== null && typeof run.line.mean[at] === "number") pairs.set(x, run.line.mean[at]);
      });
      const sorted = [...pairs].sort((a, b) => a[0] - b[0]);
      return [sorted.map((each) => each[0]), sorted.map((each) => each[1])];
    });
    const style = getComputedStyle(document.documentElement),
      ink = style.getPropertyValue("--ink-3").trim(),
      grid = style.getPropertyValue("--line").trim();
    const axisStyle = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid } };
    const lines = drawn.map((run, at) => ({
      label: run.name,
      stroke: style.getPropertyValue(TONES[at]).trim() || ink,
      width: 1.6,
      dash: DASHES[at],
      spanGaps: true,
      points: { show: false },
    }));
    plot = new uPlot(
      {
        width: holder.clientWidth || 800,
        height: 320,
        scales: { x: { time: false } },
        legend: { show: false },
        series: [{}, ...lines],
        axes: [axisStyle, { ...axisStyle, size: 56 }],
      },
      uPlot.join(tables),
      holder,
    );
  }

  const onResize = new ResizeObserver(() =>
    plot?.setSize({ width: holder.clientWidth, height: 320 }),
  );
  onResize.observe(holder);
  return {
    ready: load(),
    changed: (changed) => {
      if (changed === null || changed.some((name) => names.includes(name))) load();
    },
    themed: () => drawLines(runs.filter((run) => run.page)),
    close() {
      ended.abort();
      onResize.disconnect();
      plot?.destroy();
    },
  };
}

// How many tokens had been seen at each point. Counts that only grow are totals already; others
// are the tokens of one report, and are added up.
function tokensAt(run) {
  const { at, mean, count } = run.tokens,
    numbers = mean.map((each) => (typeof each === "number" ? each : 0));
  const isTotal =
    numbers.length > 1 && numbers.every((each, index) => !index || each > numbers[index - 1]);
  let sum = 0,
    last = -1;
  const totals = isTotal ? numbers : numbers.map((each, index) => (sum += each * count[index]));
  return run.line.at.map((time) => {
    while (last + 1 < at.length && at[last + 1] <= time + 1e-6) last += 1;
    return last < 0 ? null : totals[last];
  });
}

function flatten(value, prefix = "", out = {}) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, each] of Object.entries(value))
      flatten(each, prefix ? `${prefix}.${key}` : key, out);
  } else out[prefix] = Array.isArray(value) ? value.join(" ") : String(value);
  return out;
}
