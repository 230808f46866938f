// The logs of the ranks: opens at the end and follows. Lines are only ever inserted as text.

import { lines as stream, query } from "./api.js";
import { button, h, patch, put, timestamp } from "./dom.js";

// Budgets of one tab: lines and characters in memory, elements in the document.
const MAX_LINES = 5000;
const MAX_CHARACTERS = 2_000_000;
const MAX_ELEMENTS = 300;
const LINE_PX = 19; // as in style.css
const TAIL = 200;
const COLOURS = /\u001b\[([0-9;]*)m/g;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;
const MAX_LINE = 4096; // characters of a line that are shown

export class Logs {
  constructor(body, path, signal, rank) {
    this.path = path;
    this.name = decodeURIComponent(path);
    this.signal = signal;
    this.rank = rank;
    this.lines = [];
    this.characters = 0;
    this.number = 0;
    this.matches = [];
    this.isFollowing = true;
    this.ranks = h("input", {
      class: "mini rank",
      type: "number",
      min: 0,
      "aria-label": "Rank; empty for all",
      placeholder: "all ranks",
      onchange: () => this.choose(this.ranks.value === "" ? null : Number(this.ranks.value)),
    });
    this.search = h("input", {
      class: "mini",
      type: "search",
      "aria-label": "Search the logs",
      placeholder: "Search",
      oninput: () => {
        this.all?.ended.abort();
        this.all = null;
        this.find(0);
      },
      onkeydown: (event) => {
        if (event.key === "Enter") this.searchAll(event.shiftKey ? -1 : 1);
      },
    });
    this.hits = h("span", { class: "small soft num", role: "status" });
    this.followButton = button("Follow", () => this.follow(), {
      class: "mini",
      "aria-pressed": "true",
    });
    this.list = h("ol", {});
    this.box = h(
      "div",
      {
        class: "logs",
        tabindex: 0,
        role: "log",
        "aria-live": "off",
        "aria-label": "Log lines",
        onscroll: () => this.scrolled(),
      },
      this.list,
    );
    this.note = h("p", { class: "small dim" });
    put(
      body,
      h(
        "div",
        { class: "row logbar" },
        h("label", { class: "small soft" }, "Rank ", this.ranks),
        this.search,
        this.hits,
        button("↑", () => this.searchAll(-1), { class: "mini", "aria-label": "Previous match" }),
        button("↓", () => this.searchAll(1), { class: "mini", "aria-label": "Next match" }),
        h("span", { class: "push" }),
        this.followButton,
        button(
          "Wrap",
          (event) => {
            event.target.setAttribute("aria-pressed", String(this.box.classList.toggle("wrap")));
            this.draw();
          },
          { class: "mini", "aria-pressed": "false" },
        ),
      ),
      this.box,
      this.note,
    );
  }

  update(page, isFirst) {
    this.page = page;
    const count = page.cells.length || page.ranks.length;
    this.ranks.max = Math.max(0, count - 1);
    this.ranks.placeholder = count === 1 ? "rank 0" : `all ${count} ranks`;
    if (isFirst) {
      if (this.rank === null && page.cause) this.choose(page.cause.rank);
      else this.open();
    }
  }

  choose(rank) {
    this.rank = rank;
    this.ranks.value = rank === null ? "" : String(rank);
    this.open();
  }

  async open() {
    this.ended?.abort();
    const ended = (this.ended = new AbortController());
    this.signal.addEventListener("abort", () => ended.abort());
    this.lines = [];
    this.characters = 0;
    this.matches = [];
    this.draw();
    const many = this.page.cells.length > 64 && this.rank === null;
    const params = {
      tail: many ? 2 : TAIL,
      rank: this.rank === null ? null : this.rank,
      uid: this.page.row.uid,
    };
    let pending = [],
      timer = null;
    const flush = () => {
      timer = null;
      const fresh = pending;
      pending = [];
      this.add(fresh);
    };
    try {
      while (!ended.signal.aborted) {
        let isCut = false;
        for await (const line of stream(
          `/v1/trainings/${this.path}/logs${query({ ...params, follow: "true" })}`,
          ended.signal,
        )) {
          if (line.cut) {
            isCut = true;
            continue;
          }
          if (line.offsets) continue;
          pending.push(line);
          if (pending.length > MAX_LINES) pending.splice(0, pending.length - MAX_LINES);
          timer ??= setTimeout(flush, 100);
        }
        if (!isCut) break;
        await new Promise((go) => setTimeout(go, 1000));
        params.tail = 0;
      }
      clearTimeout(timer);
      flush();
      this.note.textContent = this.lines.length ? "End of the log." : "The ranks printed nothing.";
    } catch (error) {
      if (ended.signal.aborted) return;
      clearTimeout(timer);
      flush();
      this.note.textContent =
        error.status === 404
          ? ""
          : `The connection to the log was lost (${error.message}); trying again.`;
      setTimeout(() => {
        if (!ended.signal.aborted && error.status !== 404) this.open();
      }, 3000);
    }
  }

  add(fresh) {
    if (!fresh.length) return;
    for (const line of fresh) {
      line.number = this.number++;
      this.characters += line.text.length;
      this.lines.push(line);
    }
    let dropped = 0;
    while (
      this.lines.length - dropped > MAX_LINES ||
      (this.characters > MAX_CHARACTERS && this.lines.length - dropped > 1)
    )
      this.characters -= this.lines[dropped++].text.length;
    this.lines.splice(0, dropped);
    this.isCut ||= dropped > 0;
    this.note.textContent = this.isCut
      ? `the last ${this.lines.length.toLocaleString("en")} lines; all: atoll logs ${this.name}`
      : "";
    if (this.search.value && !this.all) this.find(0);
    if (!this.isFollowing && dropped) this.box.scrollTop -= dropped * LINE_PX;
    this.draw();
  }

  // Draws only the lines in view; padding above and below stands for the others.
  draw() {
    const isWrapped = this.box.classList.contains("wrap"),
      count = this.lines.length;
    if (this.isFollowing) {
      this.list.style.paddingBottom = "0px";
      this.list.style.paddingTop = `${isWrapped ? 0 : count * LINE_PX}px`;
      this.box.scrollTop = this.box.scrollHeight;
    }
    const visible = Math.ceil(this.box.clientHeight / LINE_PX);
    let first = this.isFollowing ? count - visible : Math.floor(this.box.scrollTop / LINE_PX);
    first = Math.max(0, Math.min(first - 40, count - visible - 80));
    let last = Math.min(count, first + Math.min(MAX_ELEMENTS, visible + 120));
    if (isWrapped) {
      last =
        this.isFollowing || this.current === undefined
          ? count
          : Math.min(count, (this.matches[this.current] ?? count) + MAX_ELEMENTS / 2);
      first = Math.max(0, last - MAX_ELEMENTS);
    }
    const hits = new Set(this.matches),
      at = this.matches[this.current];
    const lines = this.lines.slice(first, last).map((line, index) => ({
      line,
      kind: first + index === at ? "hit at" : hits.has(first + index) ? "hit" : "",
    }));
    patch(
      this.list,
      lines,
      ({ line }) => String(line.number),
      ({ kind }) => kind,
      ({ line, kind }) => this.row(line, kind),
    );
    this.list.style.paddingTop = `${isWrapped ? 0 : first * LINE_PX}px`;
    this.list.style.paddingBottom = `${isWrapped ? 0 : (count - last) * LINE_PX}px`;
    if (this.isFollowing) this.box.scrollTop = this.box.scrollHeight;
  }

  row(line, kind) {
    return h(
      "li",
      { class: kind },
      line.time === undefined || line.time === null
        ? h("time", {})
        : timestamp(line.time, line.time),
      h("span", { class: "rk" }, `[${line.rank}]`),
      h("span", { class: kindOf(line.text) }, coloured(line.text)),
    );
  }

  // Searches the whole log on the server, and loads the lines around a match that is not here.
  async searchAll(step) {
    const text = this.search.value,
      key = `${text}\n${this.rank}`;
    if (!text) return this.find(0);
    if (this.all?.key !== key) {
      this.all?.ended.abort();
      const ended = new AbortController(),
        all = (this.all = { key, ended, hits: [], at: -1, isCut: false });
      this.signal.addEventListener("abort", () => ended.abort());
      this.hits.textContent = "searching…";
      try {
        const { rank } = this,
          { uid } = this.page.row;
        const params = query({ q: text, ignoreCase: "true", rank, uid });
        const path = `/v1/trainings/${this.path}/logs/search${params}`;
        for await (const hit of stream(path, ended.signal)) {
          if (hit.done) all.isCut = hit.isCut;
          else if (!hit.cut) {
            all.hits.push(hit);
            if (step < 0) continue;
            if (all.hits.length === 1) {
              all.at = 0;
              await this.show(hit);
            } // the search of a large log goes on meanwhile
            if (this.all === all && performance.now() > (all.due || 0)) {
              all.due = performance.now() + 1000;
              this.hits.textContent = `${all.at + 1} of ${all.hits.length} so far`;
            }
          }
        }
      } catch (error) {
        if (!ended.signal.aborted) this.hits.textContent = error.message;
        return;
      }
      if (this.all !== all) return;
      if (step > 0) step = 0;
      else all.at = 0;
    }
    const { hits, isCut } = this.all,
      count = hits.length;
    if (!count) {
      this.hits.textContent = "0 in the whole log";
      return;
    }
    this.all.at = (((this.all.at + step) % count) + count) % count;
    const message = `${this.all.at + 1} of ${count}${isCut ? "+" : ""}`;
    if (step) await this.show(hits[this.all.at]);
    this.hits.textContent = message;
  }

  async show(hit) {
    let at = this.lines.findIndex(
      (line) => line.rank === hit.rank && line.at !== undefined && line.at === hit.at,
    );
    if (at < 0 && hit.start !== undefined) {
      this.ended?.abort();
      const lines = [],
        { uid } = this.page.row;
      const around = { rank: hit.rank, at: hit.start ?? 0, before: 200, after: 300, uid };
      const path = `/v1/trainings/${this.path}/logs${query(around)}`;
      for await (const line of stream(path, this.signal)) lines.push(line);
      this.lines = [];
      this.characters = 0;
      this.isPart = true;
      this.isFollowing = false;
      this.add(lines);
      this.note.textContent = `rank ${hit.rank} around the match; Follow returns to the end`;
      at = this.lines.findIndex((line) => line.at === hit.at);
    }
    if (at < 0) return;
    this.matches = [at];
    this.current = 0;
    this.isFollowing = false;
    this.pressed();
    this.draw();
    this.box.scrollTop = Math.max(0, at * LINE_PX - this.box.clientHeight / 2);
    this.draw();
  }

  find(step) {
    const text = this.search.value.toLowerCase();
    this.matches = [];
    if (text)
      this.lines.forEach((line, at) => {
        if (line.text.toLowerCase().includes(text)) this.matches.push(at);
      });
    const count = this.matches.length;
    this.hits.textContent = !text ? "" : count ? "" : "0 in these lines";
    if (count) {
      this.current =
        step === 0 ? count - 1 : ((((this.current ?? 0) + step) % count) + count) % count;
      this.hits.textContent = `${this.current + 1} of ${count}`;
      if (step) {
        this.isFollowing = false;
        this.pressed();
        this.draw();
        this.box.scrollTop = Math.max(
          0,
          this.matches[this.current] * LINE_PX - this.box.clientHeight / 2,
        );
      }
    }
    this.draw();
  }

  scrolled() {
    const isAtEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 24;
    if (isAtEnd !== this.isFollowing && !this.isPart) {
      this.isFollowing = isAtEnd;
      this.pressed();
    }
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (!this.isFollowing) this.draw();
    });
  }

  pressed() {
    this.followButton.setAttribute("aria-pressed", String(this.isFollowing));
  }

  follow() {
    this.isFollowing = true;
    this.pressed();
    if (this.isPart) {
      this.isPart = false;
      this.open();
    } else this.draw();
  }

  focus() {
    this.search.focus();
  }

  close() {
    this.ended?.abort();
  }
}

const kindOf = (text) =>
  /\b(error|exception|traceback|fatal|killed)\b/i.test(text)
    ? "e"
    : /\bwarn(ing)?\b/i.test(text)
      ? "w"
      : "";

// Draws the sixteen ANSI colours in those of the page, and escapes every other control character.
function coloured(text) {
  const last = text.slice(text.lastIndexOf("\r", text.length - 2) + 1);
  const line =
    last.length > MAX_LINE ? `${last.slice(0, MAX_LINE)}… (${last.length} characters)` : last;
  const parts = [];
  let from = 0,
    tone = "";
  for (const match of line.matchAll(COLOURS)) {
    parts.push(piece(line.slice(from, match.index), tone));
    from = match.index + match[0].length;
    for (const code of match[1].split(";").map(Number)) {
      if (code === 0) tone = "";
      else if (code >= 30 && code <= 37) tone = `c${code - 30}`;
      else if (code >= 90 && code <= 97) tone = `c${code - 90}`;
    }
  }
  parts.push(piece(line.slice(from), tone));
  return parts;
}

function piece(text, tone) {
  const safe = text.replace(
    CONTROLS,
    (char) => `\\x${char.charCodeAt(0).toString(16).padStart(2, "0")}`,
  );
  return tone ? h("span", { class: tone }, safe) : safe;
}
