// The page of one training: its state, and the cause if it failed.

import { get, now, query, state } from "./api.js";
import { act, rerun, scale, showStacks } from "./actions.js";
import { Charts } from "./charts.js";
import {
  button,
  copyable,
  clock,
  duration,
  h,
  letterOf,
  mark,
  number,
  phaseBadge,
  put,
  replaceIfChanged,
  timestamp,
} from "./dom.js";
import { Logs } from "./logs.js";
import { Rounds } from "./rounds.js";
import { RankPanel } from "./rank.js";
import { markSeen } from "./seen.js";
import { Weights } from "./weights.js";
import {
  LANES,
  cellsOf,
  chooser,
  mosaic,
  spansOf,
  strips,
  table,
  fullSpan,
  worldChart,
} from "./ranks.js";

export function showTraining(main, name, rank, go) {
  document.title = `${name} · atoll`;
  let params = new URLSearchParams(location.search);
  const ended = new AbortController();
  const path = encodeURIComponent(name);
  let page = null,
    waiting = null,
    again = false,
    isDeleted = false,
    events = [],
    lanes = [];

  const head = h("div", {}),
    facts = h("dl", { class: "facts" }),
    jump = h("nav", { class: "jump", "aria-label": "Sections" });
  const top = h("div", { class: "two" });
  const ranks = panel("ranks", "World and ranks"),
    roundPanel = panel("rounds", "Rounds"),
    weightPanel = panel("weights", "Weights"),
    chartPanel = panel("charts", "Charts"),
    logPanel = panel("logs", "Logs");
  const eventPanel = panel("events", "Events and conditions"),
    code = panel("code", "The same from code");
  const spanBar = h("div", { class: "seg push", role: "group", "aria-label": "Span of time" }),
    laneBox = h("div", {}),
    worldBox = h("div", {});
  ranks.header.append(spanBar);
  put(ranks.body, worldBox, laneBox);
  const rounds = new Rounds(roundPanel, path, ended.signal);
  const weights = new Weights(weightPanel, path, name, ended.signal);
  const charts = new Charts(chartPanel, path, ended.signal, {
    address: () => Object.fromEntries(params),
    choose: updateAddress,
    onSpan: ([from, to]) => chooseSpan({ from: from.toFixed(1), to: to.toFixed(1) }),
    onWhole: () => chooseSpan({ w: "all" }),
  });
  const logs = new Logs(logPanel.body, path, ended.signal, null);
  const sections = h(
    "div",
    { class: "sections", hidden: true },
    jump,
    top,
    ranks.panel,
    roundPanel.panel,
    weightPanel.panel,
    chartPanel.panel,
    logPanel.panel,
    h("div", { class: "two half" }, eventPanel.panel, code.panel),
  );
  put(
    main,
    h(
      "div",
      { class: "crumb" },
      h("a", { href: "/", "data-link": true }, "Trainings"),
      ` / ${name}`,
    ),
    head,
    facts,
    sections,
  );
  put(head, h("div", { class: "title" }, h("h1", {}, name)));
  const side = new RankPanel(main, path, name, {
    onClose: () => go(address(null)),
    onRank: (each) => go(address(each), { replace: true }),
    onLogs: (each) => {
      go(address(null));
      logs.choose(each);
      logPanel.panel.scrollIntoView();
    },
  });
  let selectedRank = rank === undefined ? null : Number(rank);

  function address(each) {
    return `/t/${path}${each === null ? "" : `/r/${each}`}${query(Object.fromEntries(params))}`;
  }

  // Writes choices into the address, so that a reload, the back button and a link show the same.
  function updateAddress(values) {
    for (const [key, value] of Object.entries(values)) {
      if (value === null || value === "") params.delete(key);
      else params.set(key, value);
    }
    history.replaceState(history.state, "", address(selectedRank) + location.hash);
  }

  async function load() {
    if (waiting) {
      again = true;
      return waiting;
    }
    waiting = (async () => {
      try {
        const isFirst = page === null;
        const fresh = await get(
          `/ui/page/${path}${query({ uid: params.get("uid") })}`,
          ended.signal,
        );
        events = (
          await get(`/v1/trainings/${path}/events${query({ uid: fresh.row.uid })}`, ended.signal)
        ).items;
        page = fresh;
        await loadLanes();
        draw(isFirst);
      } catch (error) {
        if (error.name === "AbortError") return;
        if (error.status === 404 && page) {
          isDeleted = true;
          draw(false);
        } else if (error.status === 404) {
          facts.hidden = true;
          put(
            head,
            h("h1", {}, name),
            h(
              "p",
              { class: "lede" },
              params.get("uid")
                ? "This training was deleted. Another one may use its name now."
                : "There is no such training.",
            ),
          );
        } else
          put(
            head,
            h("h1", {}, name),
            h("p", { class: "trouble", role: "alert" }, error.message),
            button("Try again", load),
          );
      }
    })();
    await waiting;
    waiting = null;
    if (again) {
      again = false;
      return load();
    }
  }

  async function loadLanes() {
    const laneRanks = params.get("lanes");
    lanes = laneRanks
      ? (
          await get(
            `/ui/ranks/${path}${query({ ranks: laneRanks, uid: page.row.uid })}`,
            ended.signal,
          )
        ).items
      : [];
  }

  const isOver = () => page.row.isOver;

  function draw(isFirst) {
    const { row } = page;
    sections.hidden = facts.hidden = false;
    const stalled = isOver()
      ? []
      : page.conditions.filter((each) => each.type === "Stalled" && each.status === "True");
    if (row.phase === "failed") markSeen(row.uid);
    document.title = `${letterOf(row.phase)} ${row.displayName} · atoll`;
    replaceIfChanged(
      head,
      [
        row.phase,
        row.cause,
        row.sentence,
        row.isBelow && [row.ready, row.min],
        stalled.map((each) => each.message),
        row.target,
        page.worldMax,
        isDeleted,
        state.isLive,
      ],
      () =>
        h(
          "div",
          { class: "title" },
          phaseBadge(row.phase, { size: 18 }),
          h("h1", {}, row.displayName),
          actions(),
          h(
            "p",
            { class: "lede" },
            isDeleted
              ? h(
                  "span",
                  { class: "warn" },
                  `Deleted at ${clock(now(), now())}; this is its last known state. `,
                )
              : null,
            row.cause ? [h("b", {}, capital(row.cause)), ": "] : null,
            row.cause ? row.sentence : capital(row.sentence),
            ".",
          ),
          row.isBelow
            ? h(
                "p",
                { class: "warn note" },
                `Below minimum: ${row.ready} of at least ${row.min} ranks are ready.`,
              )
            : null,
          stalled.map((each) => h("p", { class: "warn note" }, `Stalled: ${each.message}.`)),
        ),
    );
    drawFacts();
    drawJump();
    drawTop();
    drawRanks();
    drawEvents();
    drawCode();
    charts.update(page, isFirst, span()).then(drawMetrics);
    rounds.update(page).then(() => {
      drawFacts();
      drawJump();
    });
    weights.update(page).then(drawJump);
    logs.update(page, isFirst);
    if (isFirst && location.hash.length > 1)
      document.getElementById(location.hash.slice(1))?.scrollIntoView();
    if (selectedRank !== null) side.show(selectedRank, page);
  }

  function drawMetrics() {
    drawFacts();
    drawJump();
    drawRanks();
  }

  function actions() {
    const isEnd = isOver(),
      why = isDeleted
        ? "It is deleted"
        : isEnd
          ? "It has ended: there is nothing to scale"
          : state.isLive
            ? ""
            : "Not connected";
    const off = (reason) => (reason ? { "aria-disabled": "true", title: reason } : {});
    const only = (reason, action) => () => {
      if (!reason) action();
    };
    const stopped = isDeleted
      ? "It is deleted"
      : isEnd
        ? "It has ended"
        : state.isLive
          ? ""
          : "Not connected";
    const deleted = isDeleted ? "It is deleted" : state.isLive ? "" : "Not connected";
    return h(
      "div",
      { class: "acts" },
      button(
        "Rerun…",
        only(deleted, () => rerun(page, go)),
        { class: isEnd ? "primary" : "", ...off(deleted) },
      ),
      button(
        "Scale…",
        only(why, () => scale(page, page.spec.stopGraceS ?? 10)),
        off(why),
      ),
      button(
        "Cancel…",
        only(stopped, () => act("cancel", [name])),
        off(stopped),
      ),
      button(
        "Stacks",
        only(deleted, () => showStacks(name, page.row.uid, { isOver: isEnd })),
        off(deleted),
      ),
      button("Compare", () => go(`/compare${query({ t: [name] })}`)),
      button(
        "Delete…",
        only(deleted, () => act("delete", [name], { isRunning: !isEnd })),
        { class: "danger", ...off(deleted) },
      ),
    );
  }

  function drawFacts() {
    const { row } = page,
      ran = row.startedAt === null ? null : (row.endedAt || page.now) - row.startedAt;
    const loss = charts.last("loss") ?? row.loss,
      tokens = charts.last("tokens");
    put(
      facts,
      [
        ["World", `${row.ready} of ${row.target}`, `min ${row.min}, max ${page.worldMax}`],
        ["Ran", duration(ran)],
        isOver()
          ? [
              "Ended",
              clock(row.endedAt || row.since, page.now),
              `${duration(page.now - (row.endedAt || row.since))} ago`,
            ]
          : ["Started", clock(row.startedAt, page.now)],
        rounds.count()
          ? ["Round", rounds.grid.summary.round ?? "–", `${rounds.count()} committed`]
          : ["Restarts", row.restarts],
        ["Loss", number(loss)],
        ["Tokens", number(tokens)],
        ["Used", hours(page.rankSeconds), "of ranks"],
        ["Where", row.where],
      ].map(([label, value, more]) =>
        h(
          "div",
          {},
          h("dt", {}, label),
          h("dd", {}, value, more ? h("span", {}, ` ${more}`) : null),
        ),
      ),
    );
  }

  function drawJump() {
    const count = page.cells.length || page.ranks.length;
    const links = [
      page.cause ? ["cause", "Cause"] : null,
      ["ranks", "Ranks", count],
      rounds.count() ? ["rounds", "Rounds", rounds.count()] : null,
      weights.count() ? ["weights", "Weights"] : null,
      ["charts", "Charts", page.metrics.length],
      ["logs", "Logs"],
      ["events", "Events", events.length],
      ["code", "Code"],
    ].filter(Boolean);
    replaceIfChanged(jump, links, () =>
      links.map(([id, label, n]) =>
        h(
          "a",
          { href: `#${id}` },
          label,
          n ? h("span", { class: "n" }, ` ${n.toLocaleString("en")}`) : null,
        ),
      ),
    );
  }

  function drawTop() {
    replaceIfChanged(
      top,
      [page.cause, page.waiting, page.warnings, isOver() && page.timeline, page.tally],
      () => topPanels(),
    );
  }

  function topPanels() {
    const cause = page.cause;
    const warned = page.warnings.length
      ? h(
          "section",
          { class: "panel wait", id: "warnings", "aria-labelledby": "h-warn" },
          h("header", {}, h("h2", { id: "h-warn" }, "Warnings")),
          h(
            "div",
            { class: "body" },
            h(
              "ul",
              {},
              page.warnings.map((each) => h("li", {}, each)),
            ),
          ),
        )
      : null;
    if (!cause && !page.waiting.length && (!isOver() || !page.timeline.length))
      return warned ? [warned] : [];
    const left = cause
      ? causeCard(cause)
      : page.waiting.length
        ? h(
            "section",
            { class: "panel wait", "aria-labelledby": "h-wait" },
            h("header", {}, h("h2", { id: "h-wait" }, "Waiting for")),
            h(
              "div",
              { class: "body" },
              h(
                "ul",
                {},
                page.waiting.map((each) => h("li", {}, each)),
              ),
            ),
          )
        : null;
    const first = cause?.at ?? null;
    const timeline = page.timeline.length
      ? h(
          "section",
          { class: "panel", "aria-labelledby": "h-seq" },
          h(
            "header",
            {},
            h("h2", { id: "h-seq" }, "What happened"),
            h("span", { class: "push small dim" }, "from exits and events"),
          ),
          h(
            "div",
            { class: "body" },
            h(
              "ol",
              { class: "seq" },
              page.timeline.map((each) =>
                h(
                  "li",
                  { class: each.isFirst ? "first" : "" },
                  first !== null && each.at > first
                    ? h(
                        "time",
                        { title: new Date(each.at * 1000).toISOString() },
                        `+${duration(each.at - first)}`,
                      )
                    : timestamp(each.at, page.now),
                  mark(each.kind),
                  h("span", {}, each.text),
                ),
              ),
            ),
            h(
              "div",
              { class: "tally" },
              Object.entries(page.tally).map(([label, n]) =>
                h("span", { class: n ? "" : "dim" }, `${n} ${label}`),
              ),
            ),
          ),
        )
      : null;
    return [warned, left, isOver() || cause ? timeline : null];
  }

  function causeCard(cause) {
    const text = () =>
      [
        `${name}: ${cause.headline}`,
        `exit ${cause.exit}`,
        cause.host ? `host ${cause.host}` : "",
        cause.before,
        ...cause.tail,
      ]
        .filter(Boolean)
        .join("\n");
    return h(
      "section",
      { class: "panel cause", id: "cause", "aria-labelledby": "h-cause" },
      h(
        "header",
        {},
        h("h2", { id: "h-cause" }, mark("failed", 13), ` Root cause: rank ${cause.rank}`),
        h("span", { class: "push small soft" }, timestamp(cause.at, page.now)),
      ),
      h(
        "div",
        { class: "body" },
        h("p", { class: "headline" }, capital(cause.headline)),
        h(
          "dl",
          { class: "kv" },
          pair("Exit", cause.exit),
          cause.host
            ? pair(
                "Host",
                cause.neighbours ? `${cause.host}, together with ${cause.neighbours}` : cause.host,
              )
            : null,
          cause.before ? pair("Before it", cause.before) : null,
        ),
        h(
          "pre",
          {
            class: "tail",
            tabindex: 0,
            role: "region",
            "aria-label": `Last lines of rank ${cause.rank}`,
          },
          cause.tail.length
            ? cause.tail.map((line) => [
                h("span", { class: /error|exception|killed|fatal/i.test(line) ? "hit" : "" }, line),
                "\n",
              ])
            : "The rank printed nothing.",
        ),
        h(
          "div",
          { class: "row" },
          button(
            `Logs of rank ${cause.rank}`,
            () => {
              logs.choose(cause.rank);
              logPanel.panel.scrollIntoView();
            },
            { class: "mini" },
          ),
          button("Copy as text", () => navigator.clipboard.writeText(text()), { class: "mini" }),
          h("code", { class: "small dim wide" }, `atoll status ${name}`),
        ),
      ),
    );
  }

  // The span of time that lanes and charts show.
  function span() {
    const [start, end] = fullSpan(page),
      from = Number(params.get("from") || NaN),
      to = Number(params.get("to") || NaN);
    if (from < to) return [Math.max(start, from), Math.min(end, to)];
    const spans = spansOf(page);
    return (spans.find(([key]) => key === params.get("w")) || spans[0])[2];
  }

  function chooseSpan(values) {
    updateAddress({ w: null, from: null, to: null, ...values });
    drawRanks();
    charts.setSpan(span());
  }

  function shiftSpan(share) {
    const [start, end] = fullSpan(page),
      [from, to] = span(),
      by = (to - from) * share;
    const left = Math.max(start, Math.min(end - (to - from), from + by));
    chooseSpan({ from: left.toFixed(1), to: (left + to - from).toFixed(1) });
  }

  function drawRanks() {
    const spans = spansOf(page),
      isOwn = params.has("from"),
      current = span(),
      cells = cellsOf(page);
    const selectedKey = isOwn
      ? null
      : (spans.find(([key]) => key === params.get("w")) || spans[0])[0];
    spanBar.hidden = spans.length < 2 && !isOwn;
    replaceIfChanged(spanBar, [spans.map(([key]) => key), selectedKey], () =>
      spans.map(([key, label]) =>
        button(label, () => chooseSpan({ w: key }), {
          "aria-pressed": String(key === selectedKey),
        }),
      ),
    );
    replaceIfChanged(worldBox, [page.world, current, page.row.ready, page.row.target], () =>
      worldChart(page, current, ([from, to]) =>
        chooseSpan({ from: from.toFixed(1), to: to.toFixed(1) }),
      ),
    );
    const few = page.ranks.length <= LANES && !page.cells;
    const parts = { charts, isOver: isOver(), address };
    const uses = few
      ? page.ranks.map((line) => [
          charts.lastOf("machine/memory", line.rank),
          charts.lastOf("machine/cpu", line.rank),
        ])
      : null;
    replaceIfChanged(
      laneBox,
      [
        page.ranks,
        cells,
        current,
        uses,
        lanes,
        document.documentElement.dataset.theme,
        params.toString(),
      ],
      () =>
        few
          ? strips(page, page.ranks, current, parts)
          : [
              mosaic(cells, (each) => go(address(each))),
              chooser(params.get("lanes") || "", async (text) => {
                updateAddress({ lanes: text });
                await loadLanes().catch(() => {
                  lanes = [];
                });
                drawRanks();
              }),
              lanes.length ? strips(page, lanes, current, parts) : null,
              table(
                page.cells
                  ? page.ranks
                  : page.ranks.filter((line) => line.phase !== "Running" || line.restarts),
                page.cells && page.oddRanks > page.ranks.length
                  ? `Ranks that failed, wait or restarted: ${page.ranks.length} of ${page.oddRanks}`
                  : "Ranks that failed, wait or restarted",
                address,
              ),
            ],
    );
  }

  function drawEvents() {
    replaceIfChanged(eventPanel.body, [events, page.conditions], () => [
      page.conditions
        .filter((each) => each.status === "True" && each.message)
        .map((each) => h("p", { class: "note" }, h("b", {}, each.type), ` ${each.message}`)),
      events.length
        ? h(
            "div",
            { class: "ev", tabindex: 0, role: "region", "aria-label": "Events" },
            events
              .slice(0, 100)
              .map((each) => [
                timestamp(each.at, page.now),
                h("span", { class: each.type === "Warning" ? "w" : "" }, each.reason),
                h("span", { class: "m" }, each.count > 1 ? `×${each.count} ` : null, each.message),
              ]),
          )
        : h("p", { class: "dim" }, "No events."),
    ]);
    replaceIfChanged(eventPanel.tools, [events.length], () =>
      h("span", { class: "push small dim" }, events.length ? `${events.length}, newest first` : ""),
    );
  }

  const languages = { shell: "Shell", python: "Python", spec: "Spec" };
  let language = "shell";
  function drawCode() {
    const first = page.cause ? page.cause.rank : 0,
      metric = page.metrics.find((each) => each.name === "loss")?.name || page.metrics[0]?.name;
    const texts = {
      shell: [
        `atoll status ${name}`,
        `atoll logs ${name} --rank ${first} --tail 50`,
        metric ? `atoll metrics ${name} ${quoted(metric)} --plot` : null,
        `atoll metrics ${name} --csv`,
        `atoll events ${name}`,
        `atoll rerun ${name}`,
        page.shell || null,
      ]
        .filter(Boolean)
        .join("\n"),
      python: [
        `import atoll`,
        ``,
        `training = atoll.Client().get(${JSON.stringify(name)})`,
        `print(training.world, training.root_cause)`,
        `for line in training.logs(rank=${first}, tail=50):`,
        `    print(line)`,
        metric ? `table = training.metrics(${JSON.stringify(metric)})` : null,
        ``,
        page.python || `again = training.rerun()`,
      ]
        .filter((line) => line !== null)
        .join("\n"),
      spec: JSON.stringify(page.spec, null, 2),
    };
    replaceIfChanged(code.tools, [language], () =>
      h(
        "div",
        { class: "seg push", role: "group", "aria-label": "Language" },
        Object.entries(languages).map(([key, label]) =>
          button(
            label,
            () => {
              language = key;
              drawCode();
            },
            { "aria-pressed": String(language === key) },
          ),
        ),
      ),
    );
    replaceIfChanged(code.body, [language, texts[language]], () => [
      h("pre", { tabindex: 0, role: "region", "aria-label": languages[language] }, texts[language]),
      copyable(texts[language]),
    ]);
  }

  const ticker = setInterval(() => {
    // The last metrics of the ranks arrive a little after their end.
    if (
      !page ||
      isDeleted ||
      document.hidden ||
      (page.row.endedAt && now() - page.row.endedAt > 20)
    )
      return;
    page.now = now();
    rounds.load().then(drawJump);
    weights.load().then(drawJump);
    charts.refresh(page, span()).then(drawMetrics);
  }, 5000);
  const open = (each) => {
    selectedRank = each;
    if (page) side.show(each, page);
  };
  return {
    ready: load(),
    // The same training with another rank in the side panel, or none.
    moved(other, which) {
      if (other !== name) return false;
      params = new URLSearchParams(location.search);
      open(which === undefined ? null : Number(which));
      return true;
    },
    changed(names) {
      if (names === null || names.includes(name)) load();
    },
    connected() {
      if (page) draw(false);
    },
    themed() {
      charts.redraw();
      rounds.draw();
      if (page) drawRanks();
    },
    close() {
      ended.abort();
      clearInterval(ticker);
      charts.close();
      rounds.close();
      logs.close();
      side.close();
    },
    key(event) {
      if (event.key === "Escape") go(side.isOpen ? address(null) : "/");
      else if (side.isOpen && (event.key === "j" || event.key === "k")) {
        const next = selectedRank + (event.key === "j" ? 1 : -1);
        if (next >= 0 && next < (page.cells.length || page.ranks.length))
          go(address(next), { replace: true });
      } else if (event.key === "e") document.getElementById("cause")?.scrollIntoView();
      else if (event.key === "/") {
        event.preventDefault();
        logs.focus();
      } else if (event.key === "f") logs.follow();
      else if (event.key === "n" || event.key === "N") logs.find(event.key === "n" ? 1 : -1);
      else if (event.key === "0" && page) chooseSpan({ w: "all", zoom: null });
      else if ((event.key === "[" || event.key === "]") && page)
        shiftSpan(event.key === "[" ? -0.5 : 0.5);
      else if (/^[1-7]$/.test(event.key)) jump.children[Number(event.key) - 1]?.click();
    },
  };
}

const capital = (text) => (text ? text[0].toUpperCase() + text.slice(1) : text);
const pair = (label, value) => [h("dt", {}, label), h("dd", {}, value)];
const quoted = (text) => (/^[\w./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const hours = (seconds) =>
  seconds < 3600 ? duration(seconds) : `${number(Number((seconds / 3600).toPrecision(3)))} h`;

function panel(id, title) {
  const body = h("div", { class: "body" }),
    tools = h("span", { class: "push tools" });
  const header = h("header", {}, h("h2", { id: `h-${id}` }, title), tools);
  return {
    panel: h("section", { class: "panel", id, "aria-labelledby": `h-${id}` }, header, body),
    body,
    header,
    tools,
  };
}
