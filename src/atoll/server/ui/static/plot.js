// One chart: hover shows the value of every line, a drag zooms in, a double click zooms out.

import { bytes, duration, h, number, put } from "./dom.js";

export const AXES = [
  ["time", "Time"],
  ["step", "Steps"],
  ["tokens", "Tokens"],
  ["round", "Rounds"],
];
export const MAX_LINES = 64; // as many pairs of colour and dash can be told apart
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

// Colour and dash of a line. Neighbours differ in both.
export const styleOf = (at) => ({
  tone: TONES[at % TONES.length],
  dash: DASHES[(at + Math.floor(at / TONES.length)) % DASHES.length],
});

// As uPlot pads values, but only zeros do not give a scale of 0 to 100.
function extent(low, high) {
  if (low === null) return [null, null];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// NaN and infinities arrive as text; a chart has a gap there.
export const finite = (value) => (typeof value === "number" ? value : null);
export const formatOf = (name) => (value) =>
  value === null || value === undefined
    ? "–"
    : name.includes("memory") || name.includes("bytes")
      ? bytes(value)
      : name === "machine/cpu"
        ? percent(value)
        : number(value);

// Of one core, as `top` has it.
const percent = (cores) => `${Number((cores * 100).toPrecision(3))} %`;

// An exponential mean over the values before, corrected for its start, as TensorBoard has it.
export function smooth(values, weight) {
  let mean = 0,
    scale = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean * weight + value * (1 - weight);
    scale = scale * weight + (1 - weight);
    return mean / scale;
  });
}

// The controls that all charts of a page share.
export function controls(settings, onChange) {
  const slider = h("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: settings.smoothing,
    id: "smoothing",
    oninput: () => onChange({ smoothing: Number(slider.value) }),
  });
  const axes = h(
    "select",
    { class: "mini", "aria-label": "Horizontal axis", onchange: () => onChange({ x: axes.value }) },
    AXES.map(([key, label]) => h("option", { value: key }, `Over ${label.toLowerCase()}`)),
  );
  axes.value = settings.x;
  return [
    axes,
    h("label", { class: "small soft smooth", for: "smoothing" }, "Smoothing", slider),
    h(
      "button",
      {
        type: "button",
        class: "mini",
        "aria-pressed": String(settings.isLog),
        onclick: () => onChange({ isLog: !settings.isLog }),
      },
      "Log scale",
    ),
  ];
}

const two = (n) => String(n).padStart(2, "0");
const clockOf = (at, hasSeconds) => {
  const then = new Date(at * 1000);
  const seconds = hasSeconds ? `:${two(then.getSeconds())}` : "";
  return `${two(then.getHours())}:${two(then.getMinutes())}${seconds}`;
};

// How positions on an axis read. `isWall`: times are seconds since the epoch, not since the start.
function positionsOf(axis, isWall) {
  if (axis !== "time")
    return {
      ticks: (_, ticks) => ticks.map((tick) => number(tick)),
      one: (x) => `${axis} ${number(axis === "round" ? Math.floor(x) : Math.round(x))}`,
    };
  if (!isWall)
    return { ticks: (_, ticks) => ticks.map((tick) => duration(tick)), one: (x) => duration(x) };
  return {
    ticks: (_, ticks) =>
      ticks.map((tick) =>
        ticks[1] - ticks[0] >= 86400
          ? new Date(tick * 1000).toISOString().slice(5, 10)
          : clockOf(tick, ticks[1] - ticks[0] < 60),
      ),
    one: (x) => clockOf(x, true),
  };
}

// `lines`: {label, x, y, tone, dash, width, isEdge}. Edges bound a band and are not drawn.
export class Plot {
  constructor(holder, options) {
    this.holder = holder;
    this.options = options;
    this.tip = h("div", { class: "tip", hidden: true });
    this.chart = null;
    holder.tabIndex = 0;
    holder.addEventListener("keydown", (event) => this.key(event));
    holder.addEventListener("blur", () => this.hide());
  }

  draw(lines, settings) {
    const { smoothing, isLog } = settings,
      drawable = (value) => (value === null || (isLog && value <= 0) ? null : value);
    this.settings = settings;
    this.lines = lines.map((line) => ({ ...line, y: line.y.map(drawable) }));
    this.hasHidden = isLog && lines.some((line) => line.y.some((y) => y !== null && y <= 0));
    const series = [],
      tables = [];
    for (const line of this.lines) {
      tables.push([line.x, line.y]);
      series.push(this.seriesOf(line, smoothing > 0 && !line.isEdge));
    }
    for (const line of smoothing > 0 ? this.lines : [])
      if (!line.isEdge) {
        line.smoothed = smooth(line.y, smoothing);
        tables.push([line.x, line.smoothed]);
        series.push(this.seriesOf(line, false));
      }
    const data = tables.length ? uPlot.join(tables) : [[]];
    const sign = JSON.stringify([
      series.map((each) => [each.label, each.stroke, each.dash, each.points.show]),
      isLog,
      settings.x,
      document.documentElement.dataset.theme,
    ]);
    if (this.chart && this.sign === sign) this.chart.setData(data);
    else {
      this.destroy();
      this.sign = sign;
      this.chart = new uPlot(this.uplotOptions(series), data, this.holder);
      this.holder.append(this.tip);
    }
  }

  seriesOf(line, isPale) {
    if (line.isEdge)
      return { label: line.label, stroke: "transparent", width: 0, points: { show: false } };
    const stroke = colour(line.tone);
    return {
      label: line.label,
      stroke: isPale ? `${stroke}40` : stroke,
      width: line.width || 1.5,
      dash: line.dash,
      spanGaps: this.lines.length > 1 && !line.hasGaps,
      points: { show: line.x.length < 3 },
    };
  }

  uplotOptions(series) {
    const { height, format, bands, isWall, onZoom, onWhole, marks } = this.options,
      { x: axis, isLog } = this.settings,
      places = positionsOf(axis, isWall),
      grid = colour("--line"),
      pale = colour("--muted");
    const style = {
      stroke: colour("--ink-3"),
      grid: { stroke: grid, width: 1 },
      ticks: { stroke: grid },
      font: "11px system-ui",
    };
    return {
      width: this.holder.clientWidth || 480,
      height,
      legend: { show: false },
      focus: { alpha: 0.25 },
      cursor: {
        sync: this.options.sync ? { key: `${this.options.sync}-${axis}` } : undefined,
        y: false,
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => onWhole() },
      },
      scales: {
        x: {
          time: false,
          range: (chart, low, high) => {
            const pad = axis === "time" && isWall ? 30 : 1;
            return high > low ? [low, high] : [(low ?? 0) - pad, (low ?? 0) + pad];
          },
        },
        y: isLog ? { distr: 3 } : { range: (chart, low, high) => extent(low, high) },
      },
      series: [{}, ...series],
      bands: (bands || []).map(({ edges, alpha }) => ({ series: edges, fill: `${pale}${alpha}` })),
      axes: [
        {
          ...style,
          values: places.ticks,
          space: 70,
          size: 28,
          incrs: axis === "time" ? TIME_STEPS : WHOLE_STEPS,
        },
        {
          ...style,
          size: 72,
          values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))),
        },
      ],
      hooks: {
        setCursor: [(chart) => this.hover(chart)],
        setSelect: [
          (chart) => {
            const { left, width } = chart.select;
            if (width < 4) return;
            chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            onZoom([chart.posToVal(left, "x"), chart.posToVal(left + width, "x")]);
          },
        ],
        draw: marks && axis === "time" ? [(chart) => drawMarks(chart, marks())] : [],
      },
    };
  }

  hover(chart) {
    const { left } = chart.cursor;
    if (left === null || left === undefined || left < 0) {
      this.hide();
      return;
    }
    const x = chart.posToVal(left, "x"),
      places = positionsOf(this.settings.x, this.options.isWall),
      { format } = this.options,
      rows = this.lines
        .map((line) => ({ line, at: nearest(line.x, line.y, x) }))
        .filter(({ at }) => at !== null);
    if (!rows.length) {
      this.hide();
      return;
    }
    if (this.options.isOrdered) rows.sort((a, b) => Number(a.line.isEdge) - Number(b.line.isEdge));
    else rows.sort((a, b) => b.line.y[b.at] - a.line.y[a.at]);
    put(
      this.tip,
      h("b", {}, places.one(x)),
      h(
        "ul",
        { class: rows.length > 16 ? "many" : "" },
        rows.map(({ line, at }) =>
          h(
            "li",
            {},
            line.isEdge ? h("span", { class: "swatch" }) : swatch(line),
            h("span", { class: "label" }, line.label),
            h("span", { class: "num" }, format(line.y[at])),
            line.smoothed ? h("span", { class: "num dim" }, format(line.smoothed[at])) : null,
          ),
        ),
      ),
    );
    this.tip.hidden = false;
    const room = this.holder.clientWidth,
      own = this.tip.offsetWidth,
      edge = chart.over.offsetLeft + left;
    const beside = edge + 14 + own > room ? edge - own - 14 : edge + 14;
    this.tip.style.left = `${Math.max(0, Math.min(beside, room - own))}px`;
  }

  hide() {
    this.tip.hidden = true;
  }

  // Arrow keys move the cursor; Enter has no meaning here, 0 shows the whole.
  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.chart) return;
    event.preventDefault();
    const xs = this.chart.data[0],
      [low, high] = [this.chart.scales.x.min, this.chart.scales.x.max];
    const jump = Math.max(1, Math.round(xs.length / 100)),
      before = this.chart.cursor.idx ?? (step > 0 ? -jump : xs.length - 1 + jump);
    const at = Math.max(0, Math.min(xs.length - 1, before + step * jump));
    if (xs[at] < low || xs[at] > high) return;
    this.chart.setCursor({ left: this.chart.valToPos(xs[at], "x"), top: 0 });
  }

  focus(label) {
    if (!this.chart) return;
    const at = this.chart.series.findLastIndex((each, index) => index && each.label === label);
    this.chart.setSeries(at < 0 ? null : at, { focus: at > 0 });
  }

  fit() {
    this.chart?.setSize({
      width: this.holder.clientWidth || 480,
      height: this.options.height,
    });
  }

  destroy() {
    this.chart?.destroy();
    this.chart = null;
    this.tip.remove();
  }
}

// Whole seconds, minutes, hours and days, so that ticks of a clock are at full ones.
const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800,
  604800, 2592000,
];

// Steps, tokens and rounds are whole numbers.
const WHOLE_STEPS = [...Array(15).keys()].flatMap((n) => [1, 2, 5].map((each) => each * 10 ** n));

export function swatch({ tone, dash }) {
  const line = h("span", { class: "swatch" });
  line.style.color = `var(${tone})`;
  line.style.borderTopStyle = dash?.length ? (dash[0] < 3 ? "dotted" : "dashed") : "solid";
  return line;
}

// The index of the value nearest to x; null beyond the ends of the line.
function nearest(xs, ys, x) {
  if (!xs.length) return null;
  const slack = (xs[xs.length - 1] - xs[0]) / 50 || 1;
  if (x < xs[0] - slack || x > xs[xs.length - 1] + slack) return null;
  let low = 0,
    high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && x - xs[low - 1] < xs[low] - x) low -= 1;
  for (const at of [low, low - 1, low + 1]) if (ys[at] !== null && ys[at] !== undefined) return at;
  return null;
}

function drawMarks(chart, marks) {
  const { ctx, bbox } = chart;
  for (const mark of marks) {
    const x = chart.valToPos(mark.at, "x", true);
    if (!(x > bbox.left && x < bbox.left + bbox.width)) continue;
    ctx.save();
    ctx.strokeStyle = colour(mark.kind === "cause" ? "--failed" : "--ink-3");
    ctx.setLineDash(mark.kind === "cause" ? [] : [4, 4]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }
}
