// The side panel of one rank: its state, attempts, newest metrics and last lines.

import { showStacks } from "./actions.js";
import { get, lines as stream, query } from "./api.js";
import { button, clock, copyable, duration, h, mark, put, timestamp } from "./dom.js";
import { formatOf } from "./plot.js";
import { KIND_OF, stateOf } from "./ranks.js";

const TAIL = 30;
const MAX_METRICS = 12; // as many as the server answers at once

export class RankPanel {
  constructor(main, path, name, { onClose, onRank, onLogs }) {
    Object.assign(this, { path, name, onClose, onRank, onLogs });
    this.rank = null;
    this.body = h("div", { class: "sidebody" });
    this.title = h("h2", { id: "h-rank", tabindex: -1 });
    this.nav = h("span", { class: "push row" });
    this.box = h(
      "aside",
      { class: "side panel", "aria-labelledby": "h-rank", hidden: true },
      h("header", {}, this.title, this.nav),
      this.body,
    );
    main.append(this.box);
  }

  get isOpen() {
    return this.rank !== null;
  }

  async show(rank, page) {
    const isNew = rank !== this.rank;
    this.rank = rank;
    this.box.hidden = rank === null;
    this.ended?.abort();
    if (rank === null) return;
    const ended = (this.ended = new AbortController());
    const count = page.cells.length || page.ranks.length;
    put(this.title, `Rank ${rank}`);
    put(
      this.nav,
      button("↑", () => this.onRank(rank - 1), {
        class: "mini",
        disabled: rank <= 0,
        "aria-label": "Rank before",
      }),
      button("↓", () => this.onRank(rank + 1), {
        class: "mini",
        disabled: rank >= count - 1,
        "aria-label": "Rank after",
      }),
      button("Close", () => this.onClose(), { class: "mini" }),
    );
    if (isNew) {
      put(this.body, h("p", { class: "dim" }, "…"));
      this.title.focus({ preventScroll: true });
    }
    try {
      const uid = page.row.uid,
        names = page.metrics.slice(0, MAX_METRICS).map((each) => each.name);
      const [lines, metrics] = await Promise.all([
        get(`/ui/ranks/${this.path}${query({ ranks: rank, uid })}`, ended.signal),
        names.length
          ? get(
              `/v1/metrics${query({ name: names, training: this.name, ranks: "true" })}`,
              ended.signal,
            )
          : { items: [] },
      ]);
      const tail = [];
      for await (const line of stream(
        `/v1/trainings/${this.path}/logs${query({ rank, tail: TAIL, uid })}`,
        ended.signal,
      ))
        if (line.text !== undefined) tail.push(line.text);
      if (!ended.signal.aborted) this.draw(lines.items[0], metrics.items, tail, page);
    } catch (error) {
      if (error.name !== "AbortError")
        put(this.body, h("p", { class: "trouble", role: "alert" }, error.message));
    }
  }

  draw(line, metrics, tail, page) {
    if (!line) {
      put(this.body, h("p", {}, `${this.name} has no rank ${this.rank}.`));
      return;
    }
    const kind = KIND_OF[line.phase],
      isOver = line.phase !== "Running";
    const facts = [
      ["Host", line.host || "–"],
      ["Location", [line.provider, line.region].filter(Boolean).join(", ")],
      ["Unit", line.unit],
      ["Process", line.pid ?? ""],
      ["Started", line.startedAt === null ? "–" : clock(line.startedAt, page.now)],
      [
        "Ran",
        line.startedAt === null ? "–" : duration((line.endedAt ?? page.now) - line.startedAt),
      ],
      ["Restarts", line.restarts],
    ].filter(([, value]) => value !== "");
    const known =
      line.startedAt === null
        ? line.earlier
        : [
            ...line.earlier,
            {
              attempt: line.attempt,
              startedAt: line.startedAt,
              endedAt: line.endedAt,
              message: line.endedAt ? line.message : "",
            },
          ];
    const rows = [...known]
      .reverse()
      .map((each) =>
        h(
          "tr",
          {},
          h("td", { class: "num" }, each.attempt),
          h("td", {}, timestamp(each.startedAt, page.now)),
          h(
            "td",
            { class: "num" },
            each.endedAt ? duration(each.endedAt - (each.startedAt ?? each.endedAt)) : "running",
          ),
          h("td", { title: each.message }, each.message),
        ),
      );
    const own = metrics.filter((each) => each.ranks[this.rank] !== undefined);
    const cli = [
      `atoll logs ${this.name} --rank ${this.rank}`,
      `atoll status ${this.name} --attempts --rank ${this.rank}`,
      `atoll metrics ${this.name} --rank ${this.rank} --csv`,
      `atoll stacks ${this.name} ${this.rank}`,
    ].join("\n");
    put(
      this.body,
      h("p", { class: `ph ${kind}` }, mark(kind), stateOf(line)),
      h(
        "dl",
        { class: "kv" },
        facts.map(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]),
      ),
      h("h3", {}, "Attempts"),
      h(
        "div",
        { class: "scroll" },
        h(
          "table",
          { class: "ranks" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["#", "Started", "Ran", "End"].map((each) => h("th", { scope: "col" }, each)),
            ),
          ),
          h("tbody", {}, rows),
        ),
      ),
      own.length
        ? [
            h("h3", {}, "Newest metrics"),
            h(
              "dl",
              { class: "kv" },
              own.map((each) => [
                h("dt", {}, each.name),
                h("dd", {}, formatOf(each.name)(each.ranks[this.rank])),
              ]),
            ),
          ]
        : null,
      h("h3", {}, "Last lines"),
      h(
        "pre",
        { tabindex: 0, role: "region", "aria-label": `Output of rank ${this.rank}` },
        tail.length ? tail.map(plain).join("\n") : "The rank printed nothing.",
      ),
      h(
        "div",
        { class: "row" },
        button("All lines of this rank", () => this.onLogs(this.rank), { class: "mini" }),
        button("Stacks", () => showStacks(this.name, page.row.uid, { rank: this.rank, isOver }), {
          class: "mini",
        }),
      ),
      h("pre", {}, cli),
      copyable(cli),
    );
  }

  close() {
    this.ended?.abort();
  }
}

const plain = (text) =>
  text
    .replace(/\u001b\[[0-9;]*m/g, "")
    .replace(
      /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g,
      (char) => `\\x${char.charCodeAt(0).toString(16).padStart(2, "0")}`,
    );
