// Two to eight runs: what differs, and one chart a series with a line a run.

import { get, query } from "./api.js";
import { button, clock, duration, h, number, phase, put, svg } from "./dom.js";

const TONES = ["--running", "--failed", "--succeeded", "--pending", "--c5", "--cancelled", "--c6", "--ink"];
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3], [4, 4], [10, 4], [1, 3], [6, 2, 2, 2]];
const AXES = ["step", "time", "tokens"];

export function showCompare(main, go) {
  document.title = "Compare · atoll";
  const words = new URLSearchParams(location.search), names = words.getAll("t").slice(0, 8);
  const ended = new AbortController();
  let axis = AXES.includes(words.get("x")) ? words.get("x") : "step", series = words.get("s") || "loss", plot = null, runs = [];
  let isSameShown = false;
  const fold = h("span", { class: "push" });
  const add = h("input", { type: "text", "aria-label": "Name of a training to add", placeholder: "name of a training", list: "known" });
  const known = h("datalist", { id: "known" });
  const table = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Differences" }), holder = h("div", { class: "holder", role: "img" }), legend = h("ul", { class: "legend" }), note = h("p", { class: "small dim", role: "status" });
  const pick = h("select", { class: "mini", "aria-label": "Series", onchange: () => change({ s: pick.value }) });
  const axes = h("select", { class: "mini", "aria-label": "To the right", onchange: () => change({ x: axes.value }) }, AXES.map((each) => h("option", { value: each }, each)));
  put(main, h("h1", {}, "Compare"), h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); if (add.value) go(`/compare${query({ t: [...names, add.value], s: series, x: axis })}`); } }, add, known, h("button", {}, "Add")),
    h("section", { class: "panel", "aria-labelledby": "h-diff" }, h("header", {}, h("h2", { id: "h-diff" }, "What differs"), fold), h("div", { class: "body" }, table)),
    h("section", { class: "panel", "aria-labelledby": "h-curve" }, h("header", {}, h("h2", { id: "h-curve" }, "Curves"), pick, axes), h("div", { class: "body" }, holder, legend, note)));

  function change(values) {
    if (values.s) series = values.s;
    if (values.x) axis = values.x;
    history.replaceState({}, "", `/compare${query({ t: names, s: series, x: axis })}`);
    load();
  }

  async function load() {
    try {
      const rows = await get("/ui/rows?limit=200", ended.signal);
      put(known, rows.items.map((row) => h("option", { value: row.name })));
      runs = await Promise.all(names.map(async (name) => {
        try {
          const page = await get(`/ui/page/${encodeURIComponent(name)}`, ended.signal);
          const path = `/v1/trainings/${encodeURIComponent(name)}/metrics`;
          let curves = await get(`${path}${query({ name: series, rank: 0 })}`, ended.signal);
          if (!curves.items.length) curves = await get(`${path}${query({ name: series })}`, ended.signal);
          const one = curves.items[0];
          const tokens = axis === "tokens" && one ? (await get(`${path}${query({ name: "tokens", rank: one.rank })}`, ended.signal)).items[0] : null;
          return { name, page, one, tokens, names: page.series.map((each) => each.name) };
        } catch (error) {
          if (error.status !== 404) throw error;
          return { name, page: null };
        }
      }));
      draw();
    } catch (error) { if (error.name !== "AbortError") note.textContent = error.message; }
  }

  function draw() {
    const all = [...new Set(runs.flatMap((run) => run.names || []))].sort();
    axes.value = axis;
    put(pick, (all.length ? all : [series]).map((each) => h("option", { value: each }, each)));
    pick.value = series;
    const there = runs.filter((run) => run.page);
    const flat = there.map((run) => flatten(run.page.spec));
    const keys = [...new Set(flat.flatMap((each) => Object.keys(each)))].filter((key) => key !== "name" && new Set(flat.map((each) => each[key])).size > 1).sort();
    const same = [...new Set(flat.flatMap((each) => Object.keys(each)))].filter((key) => key !== "name" && !keys.includes(key)).sort();
    put(fold, there.length > 1 && same.length ? button(isSameShown ? "Only what differs" : `${same.length} fields that are the same`, () => { isSameShown = !isSameShown; draw(); }, { class: "mini" }) : null);
    const facts = [["phase", (run) => phase(run.page.row.phase)], ["ran", (run) => run.page.row.startedAt === null ? "–" : duration((run.page.row.endedAt || run.page.now) - run.page.row.startedAt)], ["last", (run) => run.one?.mean.length ? number(run.one.mean[run.one.mean.length - 1]) : "–"], ["world", (run) => `${run.page.row.ready}/${run.page.row.target}`], ["restarts", (run) => run.page.row.restarts], ["since", (run) => clock(run.page.row.since, run.page.now)]];
    put(table, names.length ? h("table", {}, h("caption", { class: "hidden" }, "Facts and differences"), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Fact"), there.map((run) => h("th", { scope: "col" }, h("a", { href: `/t/${encodeURIComponent(run.name)}`, "data-link": true }, run.name))))),
      h("tbody", {}, facts.map(([label, make]) => h("tr", {}, h("th", { scope: "row" }, label), there.map((run) => h("td", {}, make(run))))), keys.map((key) => h("tr", {}, h("th", { scope: "row" }, key), flat.map((each) => h("td", { class: "mono" }, each[key] ?? "–"))))), same.length ? h("tbody", { hidden: !isSameShown }, same.map((key) => h("tr", { class: "dim" }, h("th", { scope: "row" }, key), flat.map((each) => h("td", { class: "mono" }, each[key] ?? "–"))))) : null) : h("p", { class: "dim" }, "Name two to eight trainings, or select them in the list and press c."));
    if (there.length > 1 && !keys.length) note.textContent = "The specs do not differ.";
    drawCurves(there);
  }

  function drawCurves(there) {
    plot?.destroy();
    plot = null;
    const with_ = there.filter((run) => run.one?.at.length && (axis !== "tokens" || run.tokens)), without = runs.filter((run) => !with_.includes(run));
    put(legend, with_.map((run, at) => h("li", { class: `tone${at}` }, svg("svg", { width: 26, height: 8, "aria-hidden": "true" }, svg("path", { d: "M0 4H26", stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": DASHES[at].join(" ") })), run.name, button("×", () => go(`/compare${query({ t: names.filter((name) => name !== run.name), s: series, x: axis })}`, { replace: true }), { class: "mini quiet", "aria-label": `Remove ${run.name}` }))));
    note.textContent = without.length ? `No ${series}${axis === "tokens" ? " with tokens" : ""}: ${without.map((run) => run.page ? run.name : `${run.name} (no such training)`).join(", ")}` : "";
    holder.setAttribute("aria-label", `${series} of ${with_.map((run) => run.name).join(", ")}`);
    if (!with_.length) return;
    const tables = with_.map((run) => {
      const xs = axis === "step" ? run.one.step : axis === "tokens" ? tokensAt(run) : run.one.at.map((at) => at - run.one.at[0]), pairs = new Map();
      xs.forEach((x, at) => { if (x !== null && typeof run.one.mean[at] === "number") pairs.set(x, run.one.mean[at]); });
      const sorted = [...pairs].sort((a, b) => a[0] - b[0]);
      return [sorted.map((each) => each[0]), sorted.map((each) => each[1])];
    });
    const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--ink-3").trim(), grid = style.getPropertyValue("--line").trim();
    const axisStyle = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid } };
    const lines = with_.map((run, at) => ({ label: run.name, stroke: style.getPropertyValue(TONES[at]).trim() || ink, width: 1.6, dash: DASHES[at], spanGaps: true, points: { show: false } }));
    plot = new uPlot({ width: holder.clientWidth || 800, height: 320, scales: { x: { time: false } }, legend: { show: false }, series: [{}, ...lines], axes: [axisStyle, { ...axisStyle, size: 56 }] }, uPlot.join(tables), holder);
  }

  const onResize = new ResizeObserver(() => plot?.setSize({ width: holder.clientWidth, height: 320 }));
  onResize.observe(holder);
  return { ready: load(), changed: (changed) => { if (changed === null || changed.some((name) => names.includes(name))) load(); }, themed: () => drawCurves(runs.filter((run) => run.page)), close() { ended.abort(); onResize.disconnect(); plot?.destroy(); } };
}

// How many tokens were seen when each point was told. Counts that only grow are totals already;
// others are of one report each, and added up.
function tokensAt(run) {
  const { at, mean, count } = run.tokens, numbers = mean.map((each) => typeof each === "number" ? each : 0);
  const isTotal = numbers.length > 1 && numbers.every((each, place) => !place || each > numbers[place - 1]);
  let sum = 0, place = -1;
  const totals = isTotal ? numbers : numbers.map((each, index) => (sum += each * count[index]));
  return run.one.at.map((time) => {
    while (place + 1 < at.length && at[place + 1] <= time + 1e-6) place += 1;
    return place < 0 ? null : totals[place];
  });
}

function flatten(value, prefix = "", out = {}) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, each] of Object.entries(value)) flatten(each, prefix ? `${prefix}.${key}` : key, out);
  } else out[prefix] = Array.isArray(value) ? value.join(" ") : String(value);
  return out;
}
