// The world over time, and its ranks: a lane for each of a few, a cell for each of many.

import { button, bytes, clock, h, svg } from "./dom.js";

export const LANES = 64;
const KIND = {
  P: "pending",
  R: "running",
  r: "restarted",
  S: "succeeded",
  F: "failed",
  C: "stopped",
};
export const KIND_OF = {
  Pending: "pending",
  Running: "running",
  Succeeded: "succeeded",
  Failed: "failed",
  Stopped: "cancelled",
};
const WIDTH = 600;
const HALF_HOUR = 1800;
const HEADS = { 1: "y", 4: "x", 5: "r x", 6: "r x" }; // classes: what small screens leave out

export const stateOf = (line) =>
  `${line.message || line.phase.toLowerCase()}${line.isFirst ? ", first" : ""}`;

export function fullSpan(page) {
  const start = page.world.length ? page.world[0].at : page.createdAt;
  return [start, Math.max(page.row.endedAt || page.now, start + 1)];
}

// Named spans of time. The first is the default.
export function spansOf(page) {
  const [start, end] = fullSpan(page),
    spans = [];
  if (page.cause?.at) {
    // From the first resize or restart within the hour before the cause, and a little earlier.
    const before = page.timeline
      .slice(1)
      .map((each) => each.at)
      .filter((at) => at < page.cause.at && at > page.cause.at - 3600);
    const first = Math.min(...before, page.cause.at - 60),
      from = Math.max(start, first - (end - first) * 0.15);
    if (from > start + 1) spans.push(["failure", "Around the failure", [from, end]]);
  }
  if (!page.row.endedAt && end - start > HALF_HOUR)
    spans.push(["recent", "Last 30 min", [end - HALF_HOUR, end]]);
  return [...spans, ["all", "All", [start, end]]];
}

export function worldChart(page, [from, to], onSpan) {
  if (page.world.length < 1) return null;
  const [start, end] = fullSpan(page),
    width = 1000,
    height = 64;
  const highest = Math.max(
    page.row.target,
    ...page.world.map((point) => Math.max(point.target, point.ready)),
    1,
  );
  const x = (at) => Math.max(0, Math.min(width, ((at - start) / (end - start)) * width)),
    y = (n) => height - 4 - (n / highest) * (height - 12);
  const path = (value) =>
    page.world
      .map((point, index) => {
        const right = x(point.at).toFixed(1);
        return `${index ? `H${right}V` : `M${right} `}${y(value(point)).toFixed(1)}`;
      })
      .join("") + `H${width}`;
  const peak = Math.max(...page.world.map((point) => point.ready)),
    { ready, target } = page.row;
  const label = `Ranks ready over time: ${ready} of ${target} now, at most ${peak}.`;
  const isPart = from > start + 0.5 || to < end - 0.5;
  const brush = svg("rect", {
    x: x(from),
    y: 0,
    width: Math.max(2, x(to) - x(from)),
    height,
    class: isPart ? "brush" : "brush none",
  });
  const picture = svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
    },
    svg("path", {
      d: `${path((p) => p.ready)}V${height - 4}H${x(page.world[0].at).toFixed(1)}Z`,
      class: "ready",
    }),
    svg("path", { d: `M0 ${y(page.row.min)}H${width}`, class: "min" }),
    svg("path", { d: path((p) => p.target), class: "target" }),
    brush,
  );
  onDrag(
    picture,
    (share) => start + share * (end - start),
    (a, b) => {
      brush.setAttribute("class", "brush");
      brush.setAttribute("x", x(a));
      brush.setAttribute("width", Math.max(2, x(b) - x(a)));
    },
    onSpan,
  );
  return h(
    "figure",
    { class: "worldchart" },
    h("div", { class: "scale", "aria-hidden": "true" }, h("span", {}, highest), h("span", {}, 0)),
    picture,
    h(
      "figcaption",
      { class: "small dim" },
      `${clock(start, page.now)} to ${clock(end, page.now)}; ready (filled), target (dotted), `,
      `min ${page.row.min}. Drag to zoom in.`,
    ),
  );
}

// Calls back with the span of time that the pointer was dragged over.
function onDrag(element, timeAt, onMove, onEnd) {
  let origin = null;
  const share = (event) => {
    const box = element.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / (box.width || 1)));
  };
  const span = (event) => [origin, share(event)].sort((a, b) => a - b).map(timeAt);
  element.addEventListener("pointerdown", (event) => {
    origin = share(event);
    element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointermove", (event) => {
    if (origin !== null) onMove(...span(event));
  });
  element.addEventListener("pointerup", (event) => {
    if (origin === null) return;
    const [a, b] = span(event),
      isDrag = Math.abs(share(event) - origin) > 0.01;
    origin = null;
    if (isDrag) onEnd([a, b]);
  });
}

export function ticksOf([from, to], count = 6) {
  const steps = [
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
    604800,
  ];
  const step = steps.find((each) => (to - from) / each <= count) || 604800 * 4;
  const out = [],
    offset = new Date(from * 1000).getTimezoneOffset() * 60;
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step)
    out.push(at);
  return out;
}

const tickText = (at, [from, to]) => {
  const then = new Date(at * 1000),
    two = (n) => String(n).padStart(2, "0");
  if (to - from > 2 * 86400) return `${two(then.getMonth() + 1)}-${two(then.getDate())}`;
  return to - from < 600
    ? `${two(then.getHours())}:${two(then.getMinutes())}:${two(then.getSeconds())}`
    : `${two(then.getHours())}:${two(then.getMinutes())}`;
};

function axis(span) {
  const line = h("div", { class: "axis", "aria-hidden": "true" });
  for (const at of ticksOf(span)) {
    const share = (at - span[0]) / (span[1] - span[0]);
    if (share < (innerWidth < 700 ? 0.15 : 0.02) || share > 0.95) continue;
    const mark = h("span", {}, tickText(at, span));
    mark.style.left = `${(share * 100).toFixed(2)}%`;
    line.append(mark);
  }
  return line;
}

// Marks across all lanes and charts: resizes of the world, and the root cause of a failure.
export function marksOf(page) {
  const resize = page.resizes.map((each) => ({
    at: each.at,
    kind: "resize",
    label: `${each.fromTarget} → ${each.toTarget}`,
  }));
  return page.cause?.at
    ? [...resize, { at: page.cause.at, kind: "cause", label: `rank ${page.cause.rank} failed` }]
    : resize;
}

export function strips(page, lines, span, { charts, isOver, address }) {
  const [start, end] = span;
  const x = (at) => Math.max(0, Math.min(WIDTH, ((at - start) / (end - start)) * WIDTH));
  const labels = [
    "Rank",
    "Host",
    [h("span", { class: "hidden" }, "Over time"), axis(span)],
    isOver ? "Ended" : "State",
    "↻",
    "Memory",
    "CPU",
  ];
  const cells = labels.map((label, at) =>
    h(
      "div",
      {
        class: `h ${HEADS[at] || ""}`,
        role: "columnheader",
      },
      label,
    ),
  );
  const marks = marksOf(page).filter((mark) => mark.at > start && mark.at < end);
  const rows = lines.map((line) => {
    const until = line.endedAt ?? end,
      kind = KIND_OF[line.phase],
      state = stateOf(line),
      bits = [];
    if (line.startedAt === null) bits.push(bar(0, WIDTH, "waiting"));
    else if (line.startedAt < end) {
      const left = x(line.startedAt);
      if (left > 1)
        bits.push(
          svg("rect", {
            x: 0.5,
            y: 9.5,
            width: Math.max(0, left - 1),
            height: 6,
            class: line.previousAt ? "lane earlier" : "lane waiting",
          }),
        );
      if (until > start) bits.push(bar(left, Math.max(2, x(until) - left), "running"));
      for (const one of line.earlier) {
        if (one.endedAt < start) continue;
        const since = x(one.startedAt ?? one.endedAt);
        bits.push(
          svg(
            "rect",
            {
              x: since + 0.5,
              y: 5.5,
              width: Math.max(2, x(one.endedAt) - since - 1),
              height: 14,
              rx: 2,
              class: "lane running",
            },
            svg(
              "title",
              {},
              [
                `attempt ${one.attempt}`,
                one.startedAt ? `started ${clock(one.startedAt, page.now)}` : "",
                `ended ${clock(one.endedAt, page.now)}`,
                one.message,
              ]
                .filter(Boolean)
                .join("; "),
            ),
          ),
          cross(x(one.endedAt)),
        );
      }
      if (line.previousAt > start && !line.earlier.length) bits.push(cross(x(line.previousAt)));
      if (line.phase === "Failed" && until > start) bits.push(cross(x(until) - 6));
      if (line.phase === "Stopped" && until < end)
        bits.push(
          svg("rect", {
            x: x(until),
            y: 6,
            width: Math.max(0, WIDTH - x(until)),
            height: 13,
            class: "lane stopped",
          }),
        );
      if (line.phase === "Succeeded")
        bits.push(svg("path", { d: `M${x(until) - 12} 12l4 4 6-8`, class: "lane done" }));
    }
    for (const mark of marks)
      bits.push(svg("path", { d: `M${x(mark.at)} 0V25`, class: `lane ${mark.kind}` }));
    const title = [
      `rank ${line.rank}`,
      line.host,
      state,
      line.previous ? `before: ${line.previous}` : "",
      line.startedAt ? `started ${clock(line.startedAt, page.now)}` : "",
      line.endedAt ? `ended ${clock(line.endedAt, page.now)}` : "",
    ]
      .filter(Boolean)
      .join("; ");
    const memory = charts.lastOf("machine/memory", line.rank),
      cpu = charts.lastOf("machine/cpu", line.rank);
    return h(
      "div",
      { role: "row", class: "lanes" },
      h(
        "div",
        { class: "c rk", role: "cell" },
        h(
          "a",
          { href: address(line.rank), "data-link": true, "aria-label": `Rank ${line.rank}` },
          line.rank,
        ),
      ),
      h("div", { class: "c y mono", role: "cell", title: line.host }, line.host),
      h(
        "div",
        { class: "c lane-cell", role: "cell" },
        svg(
          "svg",
          {
            viewBox: `0 0 ${WIDTH} 25`,
            preserveAspectRatio: "none",
            role: "img",
            "aria-label": title,
          },
          svg("title", {}, title),
          bits,
        ),
      ),
      h(
        "div",
        { class: `c ${kind} ${line.isFirst ? "root" : ""}`, role: "cell", title: state },
        line.phase === "Running"
          ? line.isStalled
            ? h("b", { class: "warn" }, "stalled")
            : "running"
          : line.short
            ? `${line.short}${line.isFirst ? ", first" : ""}`
            : state,
      ),
      h("div", { class: "c x num", role: "cell" }, line.restarts || ""),
      h("div", { class: "c r x num", role: "cell" }, memory === null ? "" : bytes(memory)),
      h(
        "div",
        { class: "c r x num", role: "cell" },
        cpu === null ? "" : `${Math.round(cpu * 100)} %`,
      ),
    );
  });
  return [
    h(
      "div",
      { class: "strips", role: "table", "aria-label": "Ranks" },
      h("div", { role: "row", class: "lanes" }, cells),
      rows,
    ),
    key(marks),
  ];
}

function key(marks) {
  const swatch = (kind, label, inner) =>
    h(
      "li",
      {},
      svg(
        "svg",
        { width: 18, height: 12, viewBox: "0 0 18 12", "aria-hidden": "true" },
        svg("rect", { x: 0.5, y: 0.5, width: 17, height: 11, rx: 2, class: `lane ${kind}` }),
        inner || null,
      ),
      label,
    );
  return h(
    "ul",
    { class: "legend" },
    swatch("running", "running"),
    swatch("waiting", "waiting"),
    swatch(
      "plain",
      "failed, restarted",
      svg("path", { d: "M5 2l8 8m0-8l-8 8", class: "lane cross" }),
    ),
    swatch("stopped", "stopped by atoll"),
    marks.map((mark) =>
      h(
        "li",
        { class: mark.kind === "cause" ? "failed" : "soft" },
        `${mark.kind === "cause" ? "│" : "┊"} ${mark.label}`,
      ),
    ),
  );
}

const bar = (left, width, kind) =>
  svg("rect", {
    x: left + 0.5,
    y: 5.5,
    width: Math.max(1, width - 1),
    height: 14,
    rx: 2,
    class: `lane ${kind}`,
  });
const cross = (at) => svg("path", { d: `M${at - 4} 8l8 9m0-9l-8 9`, class: "lane cross" });

export function table(lines, label, address) {
  if (!lines.length) return h("p", { class: "dim small" }, "All ranks run without a restart.");
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h(
      "table",
      { class: "ranks" },
      h("caption", { class: "hidden" }, label),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Rank", "Host", "State", "↻"].map((each) => h("th", { scope: "col" }, each)),
        ),
      ),
      h(
        "tbody",
        {},
        lines
          .slice(0, 50)
          .map((line) =>
            h(
              "tr",
              {},
              h("td", {}, h("a", { href: address(line.rank), "data-link": true }, line.rank)),
              h("td", { class: "mono" }, line.host),
              h("td", { class: KIND_OF[line.phase] }, stateOf(line)),
              h("td", { class: "num" }, line.restarts || ""),
            ),
          ),
      ),
    ),
  );
}

export const cellsOf = (page) =>
  page.cells ||
  page.ranks
    .map((line) =>
      line.phase === "Running" && line.restarts
        ? "r"
        : Object.entries(KIND_OF)
            .find(([phase]) => phase === line.phase)?.[0][0]
            .replace("S", line.phase === "Stopped" ? "C" : "S") || "?",
    )
    .join("");

export function mosaic(cells, onRank) {
  const counts = {};
  for (const cell of cells) counts[cell] = (counts[cell] || 0) + 1;
  const summary = Object.entries(counts)
    .map(([cell, n]) => `${n.toLocaleString("en")} ${KIND[cell] || "unknown"}`)
    .join(", ");
  const columns = Math.max(32, Math.ceil(Math.sqrt(cells.length * 6))),
    size = cells.length > 5000 ? 7 : 10;
  const rows = Math.ceil(cells.length / columns),
    canvas = h("canvas", {
      width: columns * size,
      height: rows * size,
      role: "img",
      "aria-label": `Ranks: ${summary}`,
    });
  const context = canvas.getContext("2d"),
    style = getComputedStyle(document.documentElement);
  const tone = (name) => style.getPropertyValue(name).trim();
  const pale = {
    R: "--muted",
    r: "--muted",
    S: "--done",
    F: "--failed",
    P: "--pending-wash",
    C: "--hatch",
  };
  const edge = { P: "--pending", r: "--running" };
  [...cells].forEach((cell, at) => {
    const left = (at % columns) * size,
      top = Math.floor(at / columns) * size;
    context.fillStyle = tone(pale[cell] || "--edge");
    context.fillRect(left, top, size - 1, size - 1);
    if (edge[cell]) {
      context.strokeStyle = tone(edge[cell]);
      context.lineWidth = cell === "r" ? 2 : 1;
      context.strokeRect(left + 0.5, top + 0.5, size - 2, size - 2);
    }
    if (cell === "F") {
      context.strokeStyle = tone("--surface");
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(left + 2, top + 2);
      context.lineTo(left + size - 3, top + size - 3);
      context.moveTo(left + size - 3, top + 2);
      context.lineTo(left + 2, top + size - 3);
      context.stroke();
    }
  });
  const rankAt = (event) => {
    const box = canvas.getBoundingClientRect(),
      column = Math.floor(((event.clientX - box.left) / box.width) * columns),
      row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const rank = row * columns + column;
    return column >= 0 && column < columns && rank >= 0 && rank < cells.length ? rank : null;
  };
  canvas.addEventListener("mousemove", (event) => {
    const rank = rankAt(event);
    canvas.title = rank === null ? "" : `rank ${rank}: ${KIND[cells[rank]] || "unknown"}`;
  });
  canvas.addEventListener("click", (event) => {
    const rank = rankAt(event);
    if (rank !== null) onRank(rank);
  });
  return h("div", { class: "mosaic" }, h("p", { class: "counts" }, summary), canvas);
}

// A field for the ranks to draw as lanes, such as `400-415,870`.
export function chooser(value, onChange) {
  const field = h("input", {
    class: "mini",
    type: "text",
    value,
    placeholder: "400-415,870",
    pattern: "[0-9,\\- ]*",
    "aria-label": "Ranks to show as lanes",
  });
  return h(
    "form",
    {
      class: "row",
      onsubmit: (event) => {
        event.preventDefault();
        onChange(field.value.replaceAll(" ", ""));
      },
    },
    h("label", { class: "small soft" }, "As lanes: ", field),
    h("button", { class: "mini" }, "Show"),
    value ? button("Clear", () => onChange(""), { class: "mini" }) : null,
  );
}
