// Charts of the metrics that ranks report. A band covers all ranks; a chosen rank is a line.

import { get, query } from "./api.js";
import { button, bytes, h, number, put } from "./dom.js";
import { marksOf, fullSpan } from "./ranks.js";

const FIRST = ["loss", "tokens", "machine/memory", "machine/cpu"];
const MAX_CHARTS = 12; // more slow a page down, and nobody reads them
const HEIGHT = 180;
const MAX_LINES = 8; // of single ranks: there are as many colours and dashes
const TONES = [
  "--failed",
  "--succeeded",
  "--pending",
  "--c5",
  "--c6",
  "--cancelled",
  "--ink",
  "--running",
];
const DASHES = [[6, 4], [2, 3], [8, 3, 2, 3], [4, 4], [10, 4], [1, 3], [6, 2, 2, 2], []];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// NaN and infinities arrive as text; a chart has a gap there.
const finite = (value) => (typeof value === "string" ? null : value);
const format = (name, value) =>
  value === null || value === undefined
    ? "–"
    : name.includes("memory") || name.includes("bytes")
      ? bytes(value)
      : number(value);

export class Charts {
  constructor(panel, path, signal) {
    this.path = path;
    this.signal = signal;
    this.plots = new Map();
    this.bands = new Map(); // by name: the band of all ranks, then those of single ranks
    this.selected = null;
    this.perRank = new Map();
    this.lines = "furthest";
    this.isLog = false;
    this.grid = h("div", { class: "charts" });
    this.bar = h("div", { class: "row tools" });
    put(panel.tools, this.bar);
    this.note = h("p", { class: "dim" });
    put(panel.body, this.note, this.grid);
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.grid);
    this.inView = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) {
          const plot = this.plots.get(entry.target.dataset.name);
          if (plot) {
            plot.isVisible = entry.isIntersecting;
            if (plot.isVisible && plot.isOld) this.read(entry.target.dataset.name);
          }
        }
      },
      { rootMargin: "200px" },
    );
  }

  last(name) {
    const band = this.bands.get(name)?.[0];
    return band && band.mean.length ? band.mean[band.mean.length - 1] : null;
  }

  lastOf(name, rank) {
    return this.perRank.get(`${name}:${rank}`) ?? null;
  }

  async update(page, isFirst, span) {
    const isChanged = isFirst || !page.row.endedAt || !this.isFinal;
    this.isFinal = Boolean(page.row.endedAt);
    if (isChanged) await this.refresh(page, span);
    else this.page = page;
  }

  async refresh(page, span) {
    this.page = page;
    this.span = span;
    this.frame();
    for (const plot of this.plots.values()) plot.isOld = true;
    await Promise.all([
      this.readUse(),
      ...[...this.plots]
        .filter(([, plot]) => plot.isVisible !== false)
        .map(([name]) => this.read(name)),
    ]);
  }

  async setSpan(span) {
    if (this.page) await this.refresh(this.page, span);
  }

  names() {
    const known = this.page.metrics.map((each) => each.name);
    if (this.selected) return this.selected.filter((name) => known.includes(name));
    const first = FIRST.filter((name) => known.includes(name));
    return first.length ? first : known.slice(0, 4);
  }

  // Lays the charts out before their data is here, so that nothing jumps when it arrives.
  frame() {
    const { metrics, hasStore } = this.page,
      names = this.names();
    this.note.hidden = metrics.length > 0;
    if (!metrics.length)
      put(
        this.note,
        hasStore
          ? [
              "No metrics yet. One line in your program reports some: ",
              h("code", {}, "atoll.report(step=i, loss=x)"),
            ]
          : "This control plane does not store metrics.",
      );
    for (const [name, plot] of this.plots)
      if (!names.includes(name)) {
        this.inView.unobserve(plot.box);
        plot.chart?.destroy();
        plot.box.remove();
        this.plots.delete(name);
        this.bands.delete(name);
      }
    for (const name of names) if (!this.plots.has(name)) this.add(name);
    const sign = JSON.stringify([names, metrics.length, this.lines, this.isLog]);
    if (sign === this.barSign) return;
    this.barSign = sign;
    const more = metrics.filter((each) => !names.includes(each.name));
    const kinds = [
      ["band", "Band only"],
      ["furthest", "Furthest ranks"],
      ["each", "By rank"],
    ];
    put(
      this.bar,
      metrics.length
        ? h(
            "div",
            { class: "seg", role: "group", "aria-label": "Lines" },
            kinds.map(([key, label]) =>
              button(
                label,
                () => {
                  this.lines = key;
                  this.again();
                },
                { "aria-pressed": String(this.lines === key) },
              ),
            ),
          )
        : null,
      metrics.length
        ? button(
            "Log scale",
            () => {
              this.isLog = !this.isLog;
              this.again();
            },
            { class: "mini", "aria-pressed": String(this.isLog) },
          )
        : null,
      more.length
        ? h(
            "label",
            { class: "small soft" },
            h("span", { class: "hidden" }, "Add a metric "),
            h(
              "select",
              {
                class: "mini",
                onchange: (event) => {
                  if (event.target.value) {
                    this.selected = [...names, event.target.value].slice(-MAX_CHARTS);
                    this.again();
                  }
                },
              },
              h("option", { value: "" }, `${more.length} more metrics`),
              more.map((each) => h("option", { value: each.name }, each.name)),
            ),
          )
        : null,
    );
  }

  again() {
    for (const plot of this.plots.values()) {
      plot.chart?.destroy();
      plot.chart = null;
    }
    this.refresh(this.page, this.span);
  }

  add(name) {
    const now = h("span", { class: "now num" }),
      holder = h("div", { class: "holder", role: "img", "aria-label": name }),
      bad = h("span", { class: "warn small" }),
      key = h("ul", { class: "legend" });
    const box = h(
      "div",
      { class: "chart", "data-name": name },
      h(
        "h3",
        {},
        name,
        h(
          "span",
          { class: "dim" },
          this.page.metrics.find((each) => each.name === name)?.ranks > 1
            ? "mean, band of all ranks"
            : "",
        ),
        bad,
        now,
      ),
      holder,
      key,
      this.asTable(name),
    );
    this.grid.append(box);
    this.plots.set(name, { box, now, bad, holder, key, chart: null, isOld: true });
    this.inView.observe(box);
  }

  async read(name) {
    const plot = this.plots.get(name);
    if (!plot || plot.isLoading) return;
    plot.isLoading = true;
    plot.isOld = false;
    const [start, end] = this.span,
      full = fullSpan(this.page),
      isRunning = !this.page.row.endedAt;
    const count = this.page.metrics.find((each) => each.name === name)?.ranks || 1;
    const limits = {
      start: start > full[0] + 0.5 ? Math.floor(start / 5) * 5 : null,
      end: end < full[1] - 0.5 && !(isRunning && full[1] - end < 5) ? Math.ceil(end) : null,
    };
    const single =
      this.lines === "band" || count < 2
        ? {}
        : this.lines === "each"
          ? { furthest: MAX_LINES }
          : { furthest: 2 };
    try {
      const params = query({ name, uid: this.page.row.uid, bins: 600, ...limits, ...single });
      const answer = await get(`/ui/metrics/${this.path}${params}`, this.signal);
      this.bands.set(name, answer.items);
      this.draw(name);
    } catch (error) {
      if (error.name !== "AbortError") plot.bad.textContent = error.message;
    } finally {
      plot.isLoading = false;
    }
  }

  // Reads what each rank uses now, for the lanes of small worlds.
  async readUse() {
    const names = ["machine/memory", "machine/cpu"].filter((name) =>
      this.page.metrics.some((each) => each.name === name),
    );
    if (
      !names.length ||
      this.page.cells ||
      this.page.ranks.length > 64 ||
      (this.page.row.endedAt && this.perRank.size)
    )
      return;
    try {
      const training = decodeURIComponent(this.path);
      const params = query({ name: names, training, ranks: "true" });
      const answer = await get(`/v1/metrics${params}`, this.signal);
      for (const metric of answer.items)
        for (const [rank, value] of Object.entries(metric.ranks))
          this.perRank.set(`${metric.name}:${rank}`, finite(value));
    } catch (error) {
      if (error.name !== "AbortError") return;
    }
  }

  draw(name) {
    const plot = this.plots.get(name),
      [band, ...single] = this.bands.get(name) || [];
    if (!plot) return;
    if (!band) {
      plot.now.textContent = "–";
      plot.chart?.destroy();
      plot.chart = null;
      return;
    }
    const last = band.mean.length ? format(name, finite(band.mean[band.mean.length - 1])) : "–";
    plot.now.textContent = last;
    plot.bad.textContent = band.bad ? `${band.bad} not finite` : "";
    const ranks = band.ranks.length ? Math.max(...band.ranks) : 0,
      bad = band.bad ? `, ${band.bad} values not finite` : "";
    plot.holder.setAttribute("aria-label", `${name}: last ${last}, ${ranks} ranks${bad}`);
    put(
      plot.key,
      single.map((own, at) => {
        const item = h("li", {}, h("span", {}, `rank ${own.rank}`));
        item.style.color = `var(${TONES[at % TONES.length]})`;
        return item;
      }),
    );
    const data = uPlot.join([
      [
        band.at,
        band.high.map(finite),
        band.low.map(finite),
        band.p90.map(finite),
        band.p10.map(finite),
        band.mean.map(finite),
      ],
      ...single.map((own) => [own.at, own.mean.map(finite)]),
    ]);
    const sign = JSON.stringify([single.map((own) => own.rank), this.isLog]);
    if (plot.chart && plot.sign === sign) {
      plot.chart.setData(data);
      return;
    }
    plot.chart?.destroy();
    plot.sign = sign;
    plot.chart = new uPlot(
      this.options(name, band, single, plot.holder.clientWidth || 480),
      data,
      plot.holder,
    );
  }

  options(name, band, single, width) {
    const line = colour("--running"),
      pale = colour("--muted"),
      ink = colour("--ink-3"),
      grid = colour("--line");
    const axis = {
      stroke: ink,
      grid: { stroke: grid, width: 1 },
      ticks: { stroke: grid },
      font: "11px system-ui",
    };
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    const two = (n) => String(n).padStart(2, "0");
    const clockOf = (at) => {
      const then = new Date(at * 1000);
      return `${two(then.getHours())}:${two(then.getMinutes())}`;
    };
    const times = (_, ticks) =>
      ticks.map((tick) =>
        ticks[1] - ticks[0] >= 86400
          ? new Date(tick * 1000).toISOString().slice(5, 10)
          : ticks[1] - ticks[0] < 60
            ? `${clockOf(tick)}:${two(new Date(tick * 1000).getSeconds())}`
            : clockOf(tick),
      );
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: "atoll" }, y: false },
      scales: {
        x: {
          range: (chart, low, high) =>
            chart.data[0].length > 1 ? [low, high] : [low - 30, low + 30],
        },
        y: { distr: this.isLog ? 3 : 1 },
      },
      series: [
        {},
        edge,
        edge,
        edge,
        edge,
        { stroke: line, width: 1.5, points: { show: band.at.length < 3 } },
        ...single.map((_, at) => ({
          stroke: colour(TONES[at % TONES.length]),
          width: 1.2,
          dash: DASHES[at % DASHES.length],
          points: { show: false },
        })),
      ],
      bands: [
        { series: [1, 2], fill: `${pale}55` },
        { series: [3, 4], fill: `${pale}cc` },
      ],
      axes: [
        { ...axis, values: times, space: 60, size: 28 },
        {
          ...axis,
          size: 72,
          values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(name, tick))),
        },
      ],
      hooks: { draw: [(chart) => this.drawMarks(chart)] },
    };
  }

  drawMarks(chart) {
    const { ctx, bbox } = chart;
    for (const mark of marksOf(this.page)) {
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

  asTable(name) {
    const body = h("div", { class: "scroll" });
    return h(
      "details",
      {
        class: "twin",
        ontoggle: (event) => {
          const band = this.bands.get(name)?.[0];
          if (!event.target.open || !band) return;
          const step = Math.max(1, Math.ceil(band.at.length / 50));
          put(
            body,
            h(
              "table",
              {},
              h("caption", { class: "hidden" }, name),
              h(
                "thead",
                {},
                h(
                  "tr",
                  {},
                  ["Time", "Min", "Mean", "Max", "Ranks"].map((each) =>
                    h("th", { scope: "col" }, each),
                  ),
                ),
              ),
              h(
                "tbody",
                {},
                band.at
                  .filter((_, at) => at % step === 0)
                  .map((at, n) =>
                    h(
                      "tr",
                      {},
                      h("td", {}, new Date(at * 1000).toLocaleTimeString()),
                      [band.low, band.mean, band.high].map((column) =>
                        h("td", { class: "num" }, format(name, finite(column[n * step]))),
                      ),
                      h("td", {}, band.ranks[n * step]),
                    ),
                  ),
              ),
            ),
          );
        },
      },
      h("summary", { class: "small" }, "Show as table"),
      body,
    );
  }

  fit() {
    for (const plot of this.plots.values())
      plot.chart?.setSize({ width: plot.holder.clientWidth || 480, height: HEIGHT });
  }

  redraw() {
    for (const [name, plot] of this.plots) {
      plot.chart?.destroy();
      plot.chart = null;
      if (this.bands.has(name)) this.draw(name);
    }
  }

  close() {
    this.resize.disconnect();
    this.inView.disconnect();
    for (const plot of this.plots.values()) plot.chart?.destroy();
  }
}
