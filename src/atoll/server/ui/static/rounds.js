// Outer rounds as a grid of replicas and rounds, with the bytes and the seconds of each round.

import { get, query } from "./api.js";
import { button, bytes, clock, h, number, put } from "./dom.js";

const STATES = {
  i: "in",
  j: "joined",
  l: "late",
  m: "missing",
  n: "not finite, excluded",
  "-": "left",
  ".": "not a member then",
  u: "uploaded",
  w: "waited for",
};
const COLUMNS = "Rank State Weight Up Down Requests Hidden Blocked Steps Data Compute".split(" ");
const NO_COST = Array(9).fill(null);
const BAR = 26,
  GAP = 6,
  HEAD = 14;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const seconds = (value) => (value === null ? "–" : `${number(value)} s`);
const amount = (value) => (value === null ? "–" : bytes(value));

export class Rounds {
  constructor(panel, path, signal) {
    Object.assign(this, {
      panel: panel.panel,
      path,
      signal,
      grid: null,
      at: null,
      range: null,
      uid: "",
    });
    this.message = h("p", {});
    this.slow = h("ul", { class: "slow", hidden: true });
    this.labels = h("div", { class: "rlabels", "aria-hidden": "true" });
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "img",
      onkeydown: (e) => this.key(e),
      onmousemove: (e) => this.hover(e),
      onclick: (e) => this.hover(e) && this.open(),
      onmouseleave: () => this.point(null),
    });
    this.scroll = h("div", { class: "rscroll" }, this.canvas);
    this.tip = h("p", { class: "small soft rtip", role: "status" });
    this.detail = h("div", {});
    this.twin = h("div", {
      class: "scroll",
      tabindex: 0,
      role: "region",
      "aria-label": "Rounds as a table",
    });
    this.reset = button(
      "All rounds",
      () => {
        this.range = null;
        this.load();
      },
      { class: "mini", hidden: true },
    );
    const legend = h(
      "p",
      { class: "small dim" },
      Object.entries(STATES).map(([letter, label], n) => [
        n ? " · " : "",
        h("span", { class: "mono" }, letter === "i" ? "▢" : letter === "." ? "·" : sign(letter)),
        ` ${label}`,
      ]),
    );
    put(
      panel.body,
      this.message,
      this.slow,
      h("div", { class: "rgrid" }, this.labels, this.scroll),
      this.tip,
      h("div", { class: "row" }, this.reset),
      this.detail,
      legend,
      h(
        "details",
        {
          class: "twin",
          ontoggle: (event) => {
            if (event.target.open) this.table();
          },
        },
        h("summary", { class: "small" }, "Show as table"),
        this.twin,
      ),
    );
    this.panel.hidden = true;
    this.resize = new ResizeObserver(() => this.draw());
    this.resize.observe(this.scroll);
  }

  count() {
    return this.grid && this.grid.columns.length ? this.grid.summary.rounds : 0;
  }

  async update(page) {
    this.uid = page.row.uid;
    await this.load();
  }

  async load() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      const range = this.range || [];
      this.grid = await get(
        `/ui/rounds/${this.path}${query({ uid: this.uid, from: range[0], to: range[1] })}`,
        this.signal,
      );
      this.draw();
    } catch (error) {
      if (error.name !== "AbortError")
        put(this.tip, h("span", { class: "trouble" }, error.message));
    } finally {
      this.isLoading = false;
    }
  }

  draw() {
    const grid = this.grid;
    if (!grid) return;
    this.panel.hidden = !grid.columns.length;
    if (this.panel.hidden) return;
    const { summary } = grid;
    const facts = [
      sentence(grid.source),
      summary.tokens ? `${number(summary.tokens)} tokens seen` : "",
      summary.movedAt ? `the last one at ${clock(summary.movedAt, summary.movedAt)}` : "",
      grid.dropped ? `${grid.dropped} older ones were dropped` : "",
    ].filter(Boolean);
    put(
      this.message,
      h("span", {}, `${grid.message}. `),
      h("span", { class: "dim" }, `${facts.join("; ")}.`),
    );
    put(
      this.slow,
      summary.slow.map((each) => h("li", {}, sentence(each.message))),
    );
    this.slow.hidden = !summary.slow.length;
    this.reset.hidden = !this.range;
    const rows = grid.rows.length,
      columns = grid.columns.length,
      available = this.scroll.clientWidth || 800;
    this.w = Math.max(5, Math.min(22, Math.floor(available / columns)));
    this.h = rows > 64 ? 7 : rows > 24 ? 12 : 18;
    const width = this.w * columns,
      height = HEAD + this.h * rows + 2 * (BAR + GAP),
      scale = window.devicePixelRatio || 1;
    const isEnd = this.scroll.scrollLeft + this.scroll.clientWidth >= this.scroll.scrollWidth - 4;
    Object.assign(this.canvas, { width: width * scale, height: height * scale });
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.setAttribute(
      "aria-label",
      `Rounds: ${grid.message}. ${rows} rows, ${columns} columns; arrow keys move, Enter opens.`,
    );
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    this.paint(pen);
    const every = Math.max(1, Math.ceil(12 / this.h));
    put(
      this.labels,
      h("span", { class: "rhead" }, ""),
      grid.rows.map((row, n) => (n % every ? null : h("span", { class: "rlabel" }, row))),
      h("span", { class: "rbar" }, "bytes"),
      h("span", { class: "rbar" }, "seconds"),
    );
    for (const label of this.labels.querySelectorAll(".rlabel"))
      label.style.height = `${this.h * every}px`;
    if (isEnd) this.scroll.scrollLeft = this.scroll.scrollWidth;
  }

  paint(pen) {
    const { grid, w, h: tall } = this;
    const tone = {
      line: colour("--line"),
      muted: colour("--muted"),
      running: colour("--running"),
      late: colour("--pending"),
      failed: colour("--failed"),
      joined: colour("--succeeded"),
      left: colour("--cancelled"),
      ink: colour("--ink-3"),
      link: colour("--link"),
    };
    const highest = (name) => Math.max(1e-9, ...grid.columns.map((each) => each[name] || 0));
    const up = highest("bytesUp"),
      down = highest("bytesDown"),
      took = Math.max(
        1e-9,
        ...grid.columns.map((each) => (each.hiddenS || 0) + (each.blockedS || 0)),
      );
    pen.font = "10px system-ui";
    pen.textBaseline = "middle";
    grid.columns.forEach((column, at) => {
      const x = at * w,
        under = HEAD + grid.rows.length * tall + GAP;
      if (
        column.first % Math.max(1, Math.ceil(40 / w) * (column.last - column.first + 1)) === 0 &&
        !column.fragment
      ) {
        pen.fillStyle = tone.ink;
        pen.textAlign = "left";
        pen.fillText(column.first, x, HEAD / 2);
      }
      grid.cells.forEach((letters, row) =>
        this.cell(pen, letters[at], x, HEAD + row * tall, w, tall, tone),
      );
      const bytesMoved = (column.bytesUp || 0) + (column.bytesDown || 0),
        tallest = (BAR * bytesMoved) / (up + down);
      pen.fillStyle = tone.muted;
      pen.fillRect(x + 0.5, under + BAR - tallest, Math.max(1, w - 1.5), tallest);
      const base = under + BAR + GAP + BAR,
        hidden = (BAR * (column.hiddenS || 0)) / took,
        blocked = (BAR * (column.blockedS || 0)) / took;
      pen.fillRect(x + 0.5, base - hidden, Math.max(1, w - 1.5), hidden);
      pen.fillStyle = tone.late;
      pen.fillRect(x + 0.5, base - hidden - blocked, Math.max(1, w - 1.5), blocked);
    });
    if (this.at) {
      pen.strokeStyle = tone.link;
      pen.lineWidth = 2;
      pen.strokeRect(this.at[0] * w, HEAD + this.at[1] * tall, w, tall);
    }
  }

  cell(pen, letter, x, y, w, tall, tone) {
    const box = [x + 0.5, y + 0.5, w - 1.5, tall - 1.5],
      middle = [x + w / 2 - 0.25, y + tall / 2];
    pen.lineWidth = 1;
    pen.setLineDash([]);
    const text = (content, ink) => {
      pen.fillStyle = ink;
      pen.textAlign = "center";
      if (w >= 8 && tall >= 10) pen.fillText(content, ...middle);
      else pen.fillRect(...box);
    };
    if (letter === ".") {
      pen.fillStyle = tone.line;
      pen.fillRect(middle[0] - 0.75, middle[1] - 0.75, 1.5, 1.5);
      return;
    }
    if (letter === "i" || letter === "u") {
      pen.fillStyle = tone.muted;
      pen.fillRect(...box);
      if (letter === "u") {
        pen.strokeStyle = tone.running;
        pen.strokeRect(...box);
      }
      return;
    }
    if (letter === "j") {
      pen.strokeStyle = tone.joined;
      pen.strokeRect(...box);
      text("J", tone.joined);
      return;
    }
    if (letter === "l") {
      pen.fillStyle = tone.late;
      pen.fillRect(box[0], y + tall / 2, box[2], tall / 2 - 1);
      pen.strokeStyle = tone.late;
      pen.strokeRect(...box);
      return;
    }
    if (letter === "w") {
      pen.strokeStyle = tone.late;
      pen.setLineDash([2, 2]);
      pen.strokeRect(...box);
      pen.setLineDash([]);
      return;
    }
    if (letter === "m") {
      pen.strokeStyle = tone.failed;
      pen.strokeRect(...box);
      pen.beginPath();
      pen.moveTo(box[0], box[1]);
      pen.lineTo(box[0] + box[2], box[1] + box[3]);
      pen.moveTo(box[0] + box[2], box[1]);
      pen.lineTo(box[0], box[1] + box[3]);
      pen.stroke();
      return;
    }
    text(sign(letter), letter === "n" ? tone.failed : tone.left);
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = Math.floor((event.clientX - box.left) / this.w),
      row = Math.floor((event.clientY - box.top - HEAD) / this.h);
    if (!this.grid || at < 0 || at >= this.grid.columns.length) return false;
    this.point([at, Math.max(0, Math.min(this.grid.rows.length - 1, row))]);
    return true;
  }

  point(at) {
    this.at = at;
    this.draw();
    this.tip.textContent = at ? this.describe(...at) : "";
  }

  describe(at, row) {
    const column = this.grid.columns[at],
      many = column.last > column.first,
      name = many
        ? `rounds ${column.first} to ${column.last}`
        : `round ${column.first}${column.fragment ? `, fragment ${column.fragment}` : ""}`;
    const share = many ? `, ${Math.round(100 * column.share)} % were in` : `, ${column.members} in`;
    const worst = `${many ? "at worst " : ""}${STATES[this.grid.cells[row][at]]}`,
      state = `${worst}${column.isOpen ? " (not committed yet)" : share}`;
    return [
      `Rank ${this.grid.rows[row]}, ${name}: ${state}`,
      `up ${amount(column.bytesUp)}, down ${amount(column.bytesDown)}`,
      `hidden ${seconds(column.hiddenS)}, blocked ${seconds(column.blockedS)}`,
    ].join("; ");
  }

  key(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Enter" && this.at) {
      event.preventDefault();
      this.open();
      return;
    }
    const step = steps[event.key];
    if (!step || !this.grid.columns.length) return;
    event.preventDefault();
    const [at, row] = this.at || [this.grid.columns.length - 1 - step[0], -step[1]];
    const to = (value, length) => Math.max(0, Math.min(length - 1, value));
    this.point([
      to(at + step[0], this.grid.columns.length),
      to(row + step[1], this.grid.rows.length),
    ]);
  }

  async open() {
    const column = this.grid.columns[this.at[0]];
    if (column.isOpen) return;
    if (column.last > column.first) {
      this.range = [column.first, column.last];
      this.at = null;
      await this.load();
      return;
    }
    const params = { from: column.first, to: column.first, costs: "true", uid: this.uid };
    const path = `/v1/trainings/${this.path}/rounds${query(params)}`;
    const answer = await get(path, this.signal);
    const item = answer.items.find((each) => !column.fragment || each.fragment === column.fragment);
    if (item) put(this.detail, this.members(item));
  }

  members(item) {
    const costs = new Map((item.costs || []).map(([rank, ...cost]) => [rank, cost]));
    const weights = new Map(item.members.map((rank, n) => [rank, item.weights[n]]));
    const state = (rank) =>
      item.bad.includes(rank)
        ? STATES.n
        : item.joined.includes(rank)
          ? STATES.j
          : weights.has(rank)
            ? STATES.i
            : item.late.includes(rank)
              ? STATES.l
              : item.rejected.includes(rank)
                ? "its upload could not be used"
                : item.missing.includes(rank)
                  ? STATES.m
                  : STATES["-"];
    const ranks = [
      ...new Set([
        ...item.members,
        ...item.missing,
        ...item.late,
        ...item.rejected,
        ...item.left,
        ...costs.keys(),
      ]),
    ].sort((a, b) => a - b);
    const label = `Round ${item.round}`,
      facts = [
        item.attempt ? `attempt ${item.attempt + 1}` : "",
        item.bitsPerParameter === null
          ? ""
          : `${number(item.bitsPerParameter)} bits a parameter, both ways`,
        item.bitsUp === null ? "" : `${number(item.bitsUp)} up`,
        item.tokens ? `${number(item.tokens)} tokens` : "",
        item.error,
      ]
        .filter(Boolean)
        .join("; ");
    return h(
      "div",
      { class: "rdetail" },
      h("h3", {}, label, " ", h("span", { class: "dim small" }, facts)),
      h(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
        h(
          "table",
          {},
          h("caption", { class: "hidden" }, label),
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              COLUMNS.map((each) => h("th", { scope: "col" }, each)),
            ),
          ),
          h(
            "tbody",
            {},
            ranks.slice(0, 200).map((rank) => {
              const [up, down, requests, hidden, blocked, , steps, trained, read] =
                costs.get(rank) || NO_COST;
              const compute = trained ? trained - (read || 0) : null;
              return h(
                "tr",
                {},
                [
                  rank,
                  state(rank),
                  weights.has(rank) ? number(weights.get(rank)) : "–",
                  amount(up),
                  amount(down),
                  requests ?? "–",
                  seconds(hidden),
                  seconds(blocked),
                  steps || "–",
                  seconds(trained ? read : null),
                  seconds(compute),
                ].map((cell, n) => h("td", { class: n > 1 ? "num" : "" }, cell)),
              );
            }),
          ),
        ),
      ),
    );
  }

  table() {
    const from = Math.max(0, this.grid.columns.length - 50);
    put(
      this.twin,
      h(
        "table",
        {},
        h("caption", { class: "hidden" }, "Rounds"),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["Round", "Time", "In", "Late", "Missing", "Joined", "Left", "Up", "Blocked"].map(
              (each) => h("th", { scope: "col" }, each),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          this.grid.columns.slice(from).map((column, n) => {
            const who = (letters) =>
              this.grid.rows
                .filter((_, row) => letters.includes(this.grid.cells[row][from + n]))
                .join(", ") || "–";
            return h(
              "tr",
              {},
              [
                column.last > column.first ? `${column.first}–${column.last}` : column.first,
                column.at ? clock(column.at, column.at) : "–",
                column.members,
                who("l"),
                who("m"),
                who("j"),
                who("-"),
                amount(column.bytesUp),
                seconds(column.blockedS),
              ].map((cell) => h("td", {}, cell)),
            );
          }),
        ),
      ),
    );
  }

  close() {
    this.resize.disconnect();
  }
}

function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}`;
}

function sign(letter) {
  return { j: "J", l: "▄", m: "✕", n: "N", "-": "–", u: "▣", w: "┄" }[letter] || letter;
}
