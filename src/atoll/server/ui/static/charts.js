// Charts of the metrics that ranks report. A band covers all ranks; a chosen rank is a line.

import { get, query } from "./api.js";
import { button, h, number, put } from "./dom.js";
import { AXES, Plot, controls, finite, formatOf, styleOf, swatch } from "./plot.js";
import { marksOf, fullSpan } from "./ranks.js";

const FIRST = ["loss", "tokens", "machine/memory", "machine/cpu"];
const LABEL_OF = Object.fromEntries(AXES);
const MAX_CHARTS = 12; // more slow a page down, and nobody reads them
const HEIGHT = 190;
const MAX_RANKS = 8; // drawn as lines of their own; the server picks those furthest from the mean
const BANDS = [
  { edges: [1, 2], alpha: "55" },
  { edges: [3, 4], alpha: "cc" },
];

export class Charts {
  // `address` holds the choices: {x, smoothing, isLog, zoom}; `choose` writes them there.
  constructor(panel, path, signal, { address, choose, onSpan, onWhole }) {
    this.path = path;
    this.signal = signal;
    this.address = address;
    this.choose = choose;
    this.onSpan = onSpan;
    this.onWhole = onWhole;
    this.plots = new Map();
    this.bands = new Map(); // by name: the band of all ranks, then those of single ranks
    this.selected = null;
    this.perRank = new Map();
    this.lines = "furthest";
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

  settings() {
    const values = this.address();
    const x = AXES.some(([key]) => key === values.x) ? values.x : "time";
    const zoom = (values.zoom || "").split("-").map(Number);
    return {
      x,
      smoothing: Math.max(0, Math.min(0.98, Number(values.smooth) || 0)),
      isLog: values.log === "1",
      zoom: x !== "time" && zoom.length === 2 && zoom[1] > zoom[0] ? zoom : null,
    };
  }

  change({ x, smoothing, isLog, zoom }) {
    const values = {};
    if (x !== undefined) Object.assign(values, { x: x === "time" ? null : x, zoom: null });
    if (smoothing !== undefined) values.smooth = smoothing || null;
    if (isLog !== undefined) values.log = isLog ? "1" : null;
    if (zoom !== undefined) values.zoom = zoom && zoom.map((each) => each.toFixed(2)).join("-");
    this.choose(values);
    if (x === undefined && zoom === undefined) this.redraw();
    else this.refresh(this.page, this.span);
    this.frame();
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
        plot.plot.destroy();
        plot.box.remove();
        this.plots.delete(name);
        this.bands.delete(name);
      }
    for (const name of names) if (!this.plots.has(name)) this.add(name);
    const settings = this.settings(),
      sign = JSON.stringify([
        names,
        metrics.length,
        this.lines,
        settings.isLog,
        settings.x,
        settings.zoom,
      ]);
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
        ? [
            settings.zoom
              ? button("Whole", () => this.change({ zoom: null }), { class: "mini" })
              : null,
            metrics.some((each) => each.ranks > 1)
              ? h(
                  "div",
                  { class: "seg", role: "group", "aria-label": "Lines" },
                  kinds.map(([key, label]) =>
                    button(
                      label,
                      () => {
                        this.lines = key;
                        this.refresh(this.page, this.span);
                      },
                      { "aria-pressed": String(this.lines === key) },
                    ),
                  ),
                )
              : null,
            controls(settings, (values) => this.change(values)),
          ]
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
                    this.refresh(this.page, this.span);
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
    const plot = new Plot(holder, {
      height: HEIGHT,
      format: formatOf(name),
      bands: BANDS,
      isWall: true,
      isOrdered: true,
      sync: "atoll",
      marks: () => marksOf(this.page),
      onZoom: (span) => {
        if (this.settings().x === "time") this.onSpan(span);
        else this.change({ zoom: span });
      },
      onWhole: () => {
        if (this.settings().x === "time") this.onWhole();
        else this.change({ zoom: null });
      },
    });
    this.plots.set(name, { box, now, bad, holder, key, plot, isOld: true });
    this.inView.observe(box);
  }

  async read(name) {
    const plot = this.plots.get(name);
    if (!plot || plot.isLoading) return;
    plot.isLoading = true;
    plot.isOld = false;
    const count = this.page.metrics.find((each) => each.name === name)?.ranks || 1;
    const { x, zoom } = this.settings();
    const single =
      this.lines === "band" || count < 2 ? {} : { furthest: this.lines === "each" ? MAX_RANKS : 2 };
    try {
      const params = query({
        name,
        uid: this.page.row.uid,
        bins: 600,
        x,
        ...(x === "time" ? this.limits() : zoom ? { start: zoom[0], end: zoom[1] } : {}),
        ...single,
      });
      const answer = await get(`/ui/metrics/${this.path}${params}`, this.signal);
      this.bands.set(name, answer.items);
      this.draw(name);
    } catch (error) {
      if (error.name !== "AbortError") plot.bad.textContent = error.message;
    } finally {
      plot.isLoading = false;
    }
  }

  // The span of time as the server gets it: nothing where it is the whole.
  limits() {
    const [start, end] = this.span,
      full = fullSpan(this.page),
      isRunning = !this.page.row.endedAt;
    return {
      start: start > full[0] + 0.5 ? Math.floor(start / 5) * 5 : null,
      end: end < full[1] - 0.5 && !(isRunning && full[1] - end < 5) ? Math.ceil(end) : null,
    };
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
      [band, ...single] = this.bands.get(name) || [],
      settings = this.settings(),
      format = formatOf(name);
    if (!plot) return;
    if (!band) {
      plot.now.textContent = "–";
      plot.plot.destroy();
      return;
    }
    const mean = band.mean.map(finite),
      last = format(mean.findLast((each) => each !== null) ?? null),
      ranks = band.ranks.length ? Math.max(...band.ranks) : 0;
    const edges =
      ranks > 1
        ? [
            ["max", band.high],
            ["min", band.low],
            ["p90", band.p90],
            ["p10", band.p10],
          ]
        : [
            ["max", []],
            ["min", []],
            ["p90", []],
            ["p10", []],
          ];
    const lines = [
      ...edges.map(([label, y]) => ({
        label,
        x: y.length ? band.at : [],
        y: y.map(finite),
        isEdge: true,
      })),
      {
        label: ranks > 1 ? "mean" : name,
        x: band.at,
        y: mean,
        ...styleOf(0),
        hasGaps: true,
        isEdge: false,
      },
      ...single.map((own, at) => ({
        label: `rank ${own.rank}`,
        x: own.at,
        y: own.mean.map(finite),
        ...styleOf(at + 1),
        width: 1.2,
        hasGaps: true,
        isEdge: false,
      })),
    ];
    plot.plot.draw(lines, settings);
    plot.now.textContent = last;
    plot.bad.textContent = [
      band.bad ? `${band.bad} not finite` : "",
      !band.at.length && !band.unplaced ? "no points in this part" : "",
      band.unplaced && !band.at.length ? `no ${settings.x} is known here` : "",
      band.unplaced && band.at.length ? `${band.unplaced} points without a ${settings.x}` : "",
      plot.plot.hasHidden ? "zero and below are not drawn" : "",
    ]
      .filter(Boolean)
      .join(", ");
    const bad = band.bad ? `, ${band.bad} values not finite` : "";
    plot.holder.setAttribute("aria-label", `${name}: last ${last}, ${ranks} ranks${bad}`);
    put(
      plot.key,
      single.map((own, at) => h("li", {}, swatch(styleOf(at + 1)), `rank ${own.rank}`)),
    );
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
          const step = Math.max(1, Math.ceil(band.at.length / 50)),
            { x } = this.settings(),
            format = formatOf(name);
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
                  [LABEL_OF[x], "Min", "Mean", "Max", "Ranks"].map((each) =>
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
                      h(
                        "td",
                        {},
                        x === "time" ? new Date(at * 1000).toLocaleTimeString() : number(at),
                      ),
                      [band.low, band.mean, band.high].map((column) =>
                        h("td", { class: "num" }, format(finite(column[n * step]))),
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
    for (const { plot } of this.plots.values()) plot.fit();
  }

  redraw() {
    for (const name of this.plots.keys()) if (this.bands.has(name)) this.draw(name);
  }

  close() {
    this.resize.disconnect();
    this.inView.disconnect();
    for (const { plot } of this.plots.values()) plot.destroy();
  }
}
