// Compares trainings: one metric of each as a line, and a table with a row for each training.

import { get, query } from "./api.js";
import { button, duration, h, number, phaseBadge, put } from "./dom.js";
import { AXES, MAX_LINES, Plot, controls, finite, formatOf, styleOf, swatch } from "./plot.js";

const HEIGHT = 340;
const COLUMN_PX = 100; // of a column that differs, about: more of them than fit are folded
const FIXED_PX = 640; // all other columns together
const styles = new Map(); // by name: a line keeps its colour when others are removed

const labelOf = (axis) => Object.fromEntries(AXES)[axis].toLowerCase();

const styleOfName = (name) => {
  if (!styles.has(name)) styles.set(name, styles.size % MAX_LINES);
  return styleOf(styles.get(name));
};

export function showCompare(main, go) {
  document.title = "Compare · atoll";
  const params = new URLSearchParams(location.search),
    names = [...new Set(params.getAll("t"))],
    hidden = new Set(params.getAll("hide"));
  const ended = new AbortController();
  let metric = params.get("s") || "loss",
    settings = {
      x: AXES.some(([key]) => key === params.get("x")) ? params.get("x") : "step",
      smoothing: Math.max(0, Math.min(0.98, Number(params.get("smooth")) || 0)),
      isLog: params.get("log") === "1",
    },
    zoom = null,
    sort = params.get("sort") || "",
    hasAll = false,
    answer = null;
  const add = h("input", {
    type: "text",
    "aria-label": "Name of a training to add",
    placeholder: "name of a training",
    list: "known",
  });
  const known = h("datalist", { id: "known" });
  const table = h("div", { class: "scroll runs", tabindex: 0, role: "region" }),
    holder = h("div", { class: "holder", role: "img", "aria-label": "Chart" }),
    note = h("p", { class: "small dim", role: "status" }),
    same = h("details", { class: "twin", hidden: true }),
    fold = h("span", { class: "push row" }),
    tools = h("span", { class: "push row tools" });
  table.setAttribute("aria-label", "Settings and metrics");
  const pick = h("select", {
    class: "mini",
    "aria-label": "Metric",
    onchange: () => change({ metric: pick.value }),
  });
  const plot = new Plot(holder, {
    height: HEIGHT,
    format: (value) => formatOf(metric)(value),
    isWall: false,
    onZoom: (span) => {
      zoom = span;
      drawLines();
    },
    onWhole: () => {
      zoom = null;
      drawLines();
    },
  });
  put(
    main,
    h("h1", {}, "Compare"),
    h(
      "form",
      {
        class: "row",
        onsubmit: (event) => {
          event.preventDefault();
          if (add.value) go(address([...names, add.value]));
        },
      },
      add,
      known,
      h("button", {}, "Add"),
    ),
    h(
      "section",
      { class: "panel", "aria-labelledby": "h-metric" },
      h("header", {}, h("h2", { id: "h-metric" }, "Metric"), pick, tools),
      h("div", { class: "body" }, holder, note),
    ),
    h(
      "section",
      { class: "panel", "aria-labelledby": "h-runs" },
      h("header", {}, h("h2", { id: "h-runs" }, "Trainings"), fold),
      h("div", { class: "body" }, table, same),
    ),
  );

  function address(trainings = names) {
    return `/compare${query({
      t: trainings,
      s: metric === "loss" ? "" : metric,
      x: settings.x === "step" ? "" : settings.x,
      smooth: settings.smoothing || "",
      log: settings.isLog ? "1" : "",
      sort,
      hide: [...hidden].filter((name) => trainings.includes(name)),
    })}`;
  }

  function change(values) {
    const isRead = values.metric || values.x;
    if (values.metric) metric = values.metric;
    if (values.sort !== undefined) sort = values.sort;
    if (isRead) zoom = null;
    settings = { ...settings, ...values };
    history.replaceState({}, "", address());
    if (isRead) load();
    else draw();
  }

  async function load() {
    try {
      const rows = await get("/ui/rows?limit=200", ended.signal);
      put(
        known,
        rows.items.map((row) => h("option", { value: row.name })),
      );
      answer = await get(
        `/ui/compare${query({ t: names, name: metric, x: settings.x })}`,
        ended.signal,
      );
      draw();
    } catch (error) {
      if (error.name !== "AbortError") note.textContent = error.message;
    }
  }

  function draw() {
    const all = [...new Set(answer.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
    put(
      pick,
      (all.includes(metric) ? all : [metric, ...all]).map((each) =>
        h("option", { value: each }, each),
      ),
    );
    pick.value = metric;
    if (tools.dataset.sign !== `${settings.x} ${settings.isLog}`) {
      tools.dataset.sign = `${settings.x} ${settings.isLog}`;
      put(tools, controls(settings, change));
    }
    drawTable();
    drawLines();
  }

  // Settings and fields as columns: those that differ, and the values that all have in common.
  function columns() {
    const differing = [],
      common = [];
    for (const kind of ["settings", "fields"]) {
      const keys = new Set(answer.runs.flatMap((run) => Object.keys(run[kind])));
      for (const key of [...keys].sort()) {
        const values = new Set(answer.runs.map((run) => run[kind][key]));
        if (values.size > 1) differing.push([key, (run) => run[kind][key]]);
        else common.push([key, [...values][0]]);
      }
    }
    return { differing, common };
  }

  function drawTable() {
    if (!answer.runs.length) {
      put(
        table,
        h("p", { class: "dim" }, "Name trainings above, or select them in the list and press c."),
      );
      same.hidden = true;
      put(fold);
      return;
    }
    const { differing, common } = columns(),
      room = Math.max(2, Math.floor((table.clientWidth - FIXED_PX) / COLUMN_PX)),
      shown = hasAll ? differing : differing.slice(0, room);
    put(
      fold,
      differing.length > room
        ? button(
            hasAll ? "Fewer columns" : `${differing.length - shown.length} more that differ`,
            () => {
              hasAll = !hasAll;
              drawTable();
            },
            { class: "mini" },
          )
        : null,
    );
    const format = formatOf(metric),
      ran = ({ row }) =>
        row.startedAt === null ? null : (row.endedAt || answer.now) - row.startedAt;
    const heads = [
      ["name", (run) => run.row.displayName],
      ["phase", (run) => run.row.phase],
      ["ran", ran],
      [`${metric}, last`, (run) => finite(run.metrics[metric]?.last)],
      [`${metric}, best`, (run) => finite(run.metrics[metric]?.best)],
      ...shown,
    ];
    const runs = sorted(answer.runs, heads, sort);
    put(
      table,
      h(
        "table",
        { class: "compare" },
        h("caption", { class: "hidden" }, "Trainings, what differs between them, and their metric"),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { class: "ck" }, h("span", { class: "hidden" }, "Drawn")),
            heads.map(([label]) => {
              const order =
                sort === label ? "ascending" : sort === `-${label}` ? "descending" : null;
              return h(
                "th",
                { scope: "col", title: label, "aria-sort": order },
                button(label, () => change({ sort: order === "ascending" ? `-${label}` : label })),
              );
            }),
            h("th", { class: "ck" }, h("span", { class: "hidden" }, "Remove")),
          ),
        ),
        h(
          "tbody",
          {},
          runs.map((run) =>
            h(
              "tr",
              {
                onmouseenter: () => plot.focus(run.row.displayName),
                onmouseleave: () => plot.focus(null),
              },
              h(
                "td",
                { class: "ck" },
                h("input", {
                  type: "checkbox",
                  checked: !hidden.has(run.name),
                  "aria-label": `Draw ${run.name}`,
                  onchange: (event) => {
                    if (event.target.checked) hidden.delete(run.name);
                    else hidden.add(run.name);
                    history.replaceState({}, "", address());
                    drawLines();
                  },
                }),
              ),
              h(
                "th",
                { scope: "row", title: run.row.displayName },
                swatch(styleOfName(run.name)),
                h(
                  "a",
                  { href: `/t/${encodeURIComponent(run.name)}`, "data-link": true },
                  run.row.displayName,
                ),
              ),
              h("td", {}, phaseBadge(run.row.phase)),
              h("td", { class: "num" }, ran(run) === null ? "–" : duration(ran(run))),
              ["last", "best"].map((each) => h("td", { class: "num" }, value(run, each, format))),
              shown.map(([, of]) =>
                h("td", { class: "mono", title: of(run) ?? "not set" }, of(run) ?? "–"),
              ),
              h(
                "td",
                { class: "ck" },
                button(
                  "×",
                  () => {
                    const others = answer.runs.filter((each) => each !== run);
                    go(address(others.map((each) => each.name)), { replace: true });
                  },
                  { class: "mini muted", "aria-label": `Remove ${run.name}` },
                ),
              ),
            ),
          ),
        ),
      ),
    );
    same.hidden = !common.length || answer.runs.length < 2;
    put(
      same,
      h("summary", { class: "small" }, `${common.length} that are the same`),
      h(
        "dl",
        { class: "same" },
        common.map(([key, text]) => [h("dt", {}, key), h("dd", { class: "mono" }, text)]),
      ),
    );
  }

  const value = (run, each, format) => {
    const found = run.metrics[metric]?.[each];
    return typeof found === "string" ? found : format(found);
  };

  function drawLines() {
    const wanted = answer.runs.filter((run) => !hidden.has(run.name)),
      present = wanted.filter((run) => run.line?.at.length),
      drawn = present.slice(0, MAX_LINES),
      without = wanted.filter((run) => !run.line?.at.length).map((run) => run.name);
    const inZoom = (at) => !zoom || (at >= zoom[0] && at <= zoom[1]);
    plot.draw(
      drawn.map((run) => {
        const kept = run.line.at.map((_, at) => at).filter((at) => inZoom(run.line.at[at]));
        return {
          label: run.row.displayName,
          x: kept.map((at) => run.line.at[at]),
          y: kept.map((at) => finite(run.line.mean[at])),
          ...styleOfName(run.name),
        };
      }),
      settings,
    );
    holder.setAttribute("aria-label", `${metric} of ${drawn.map((run) => run.name).join(", ")}`);
    const lacks = settings.x === "time" ? metric : `${metric} over ${labelOf(settings.x)}`;
    put(
      note,
      zoom
        ? button("Whole", () => plot.options.onWhole(), { class: "mini" })
        : present.length
          ? "Drag to zoom. "
          : "",
      [
        without.length ? `No ${lacks}: ${list(without)}. ` : "",
        present.length > drawn.length
          ? `Not drawn: ${list(present.slice(MAX_LINES).map((run) => run.name))}. ` +
            `A chart has at most ${MAX_LINES} lines: uncheck others. `
          : "",
        answer.missing.length ? `No such training: ${list(answer.missing)}. ` : "",
        answer.leftOut.length
          ? `Left out, as a page compares at most 200: ${list(answer.leftOut)}. `
          : "",
        plot.hasHidden ? "Values of zero and below are not drawn. " : "",
      ].join(""),
    );
  }

  const onResize = new ResizeObserver(() => plot.fit());
  onResize.observe(holder);
  return {
    ready: load(),
    changed: (changed) => {
      if (changed === null || changed.some((name) => answer?.runs.some((run) => run.name === name)))
        load();
    },
    themed: () => answer && drawLines(),
    close() {
      ended.abort();
      onResize.disconnect();
      plot.destroy();
    },
    key(event) {
      if (event.key === "0" && answer) plot.options.onWhole();
      else if (event.key === "Escape") go("/");
    },
  };
}

const list = (names) =>
  names.length > 6
    ? `${names.slice(0, 5).join(", ")} and ${number(names.length - 5)} more`
    : names.join(", ");

// Numbers by value, texts by name, empty ones last.
function sorted(runs, heads, sort) {
  const of = heads.find(([label]) => label === sort.replace(/^-/, ""))?.[1];
  if (!of) return runs;
  const sign = sort.startsWith("-") ? -1 : 1,
    keyOf = (run) => {
      const value = of(run);
      return value === "" || Number.isNaN(Number(value ?? NaN)) ? (value ?? null) : Number(value);
    };
  return [...runs].sort((a, b) => {
    const [left, right] = [keyOf(a), keyOf(b)];
    if (left === null || right === null) return Number(left === null) - Number(right === null);
    const order =
      typeof left === "number" && typeof right === "number"
        ? left - right
        : String(left).localeCompare(String(right));
    return sign * order;
  });
}
