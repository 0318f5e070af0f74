// The timeline: a lane for each rank of a pipeline, one for compute and one for each axis, and the memory in use below,
// on one scale of time.

const LANE = 26,
  PHASES = 18,
  GAP = 8,
  MEMORY = 130,
  LEFT = 92,
  SCALE = 22,
  TOP = 4;

// The phase of a program of a pipeline.
const PARTS = { forward: "forward", backward: "backward", weights: "weights", exchange: "update", update: "update" };

const timeline = {
  canvas: byId("timeline"),
  from: 0,
  to: 1,
  lanes: [],
  spans: [],
  curves: [],
  selected: "",
  pointer: null,
  drag: null,

  /** Take in the data, and listen. */
  start() {
    if (!TIMELINE) {
      byId("time").replaceChildren(element("h2", null, "Timeline"),
        element("p", null, "There is no timeline: the time of a step on this device is not known."));
      return;
    }
    if (REPORT.lanes?.length) byId("time").querySelector("small").textContent =
      "estimated for each rank of the pipeline; compute, communication and memory of one";
    this.whole = TIMELINE.seconds || 1e-9;
    this.to = this.whole;
    this.lanes = [...new Set([...(REPORT.lanes || []).map(({ name }) => name), "compute",
        ...DATA.axes.map(([name]) => name), ...TIMELINE.spans.map((span) => span[1])])]
      .filter((lane) => lane === "compute" || TIMELINE.spans.some((span) => span[1] === lane));
    this.spans = TIMELINE.spans.map((each) => this.span(...each))
      .sort((a, b) => a.start - b.start);
    this.phases = this.phaseRuns();
    this.curves = Object.entries(TIMELINE.memory).map(([device, changes]) => ({ device, changes }));
    this.most = Math.max(1, ...this.curves.flatMap(({ changes }) => changes.map(([, size]) => size)));
    this.canvas.style.height = `${this.height()}px`;
    this.listen();
    this.legend();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  },

  span(node, lane, start, end, part) {
    const one = COLLECTIVES.get(node),
      value = finalValue(node);
    const exposed = one && lane !== "compute" && end > start ? Math.min(1, one.exposed / (end - start)) : 0;
    return {
      node,
      lane: this.lanes.indexOf(lane),
      start,
      end,
      exposed,
      transfer: lane !== "compute" && !part,
      bar: Boolean(part),
      phase: PARTS[part] || (value ? value.phase : ""),
      module: value ? value.module : ""
    };
  },

  /** The stretches of compute that belong to one phase. */
  phaseRuns() {
    const runs = [];
    for (const span of this.spans) {
      if (!span.phase || span.transfer || span.bar) continue;
      const last = runs[runs.length - 1];
      if (last && last.phase === span.phase) last.end = span.end;
      else runs.push({ phase: span.phase, start: span.start, end: span.end });
    }
    return runs;
  },

  legend() {
    const names = [
      ["forward", "forward"],
      ["backward", "backward"],
      ...(this.spans.some(({ phase }) => phase === "weights") ? [["weights", "gradients of weights"]] : []),
      ["update", "update"],
      ["communication", "communication, hidden"],
      ["exposed", "exposed: compute waits"],
      ...this.curves.map(({ device }, k) => [CURVES[k % CURVES.length], `memory in use on ${device}`])
    ];
    byId("legend").replaceChildren(...names.map(([name, text]) =>
      element("span", { style: `--color: var(--${name})` }, text)));
  },

  memoryTop() { return TOP + PHASES + this.lanes.length * (LANE + GAP) + GAP + 10; },
  height() { return this.memoryTop() + MEMORY + SCALE; },
  width() { return this
    .wide; }, // as it was painted: to ask the canvas for each bar would take longer than to draw it
  x(seconds) { return LEFT + ((seconds - this.from) / (this.to - this.from)) * (this.width() - LEFT - 8); },
  seconds(x) { return this.from + ((x - LEFT) / (this.width() - LEFT - 8)) * (this.to - this.from); },
  laneTop(lane) { return TOP + PHASES + lane * (LANE + GAP); },

  /** Draw again before the next frame. */
  draw() {
    if (this.drawing || !this.spans.length) return;
    this.drawing = true;
    requestAnimationFrame(() => { this.drawing = false;
      this.paint(); });
  },

  paint() {
    const ratio = window.devicePixelRatio || 1,
      height = this.height(),
      width = this.canvas.clientWidth;
    if (!width) return;
    this.wide = width;
    const size = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== size[0] || this.canvas.height !== size[1])[this.canvas.width, this.canvas.height] =
    size;
    const to = this.canvas.getContext("2d");
    to.setTransform(ratio, 0, 0, ratio, 0, 0);
    to.clearRect(0, 0, width, height);
    to.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    to.textBaseline = "middle";
    this.colors = Object.fromEntries(["forward", "backward", "weights", "update", "other", "communication", "exposed", "memory",
      "memory-soft", "text", "muted", "line", "sunken", "surface", "accent"
    ].map((name) => [name, color(name)]));
    this.paintLanes(to, width);
    to.save();
    to.beginPath();
    to.rect(LEFT, 0, width - LEFT - 8, height);
    to.clip();
    this.paintPhases(to);
    this.paintSpans(to);
    to.restore();
    paintMemory(to, this);
    this.paintScale(to, width, height);
    this.paintPointer(to);
  },

  paintLanes(to, width) {
    this.lanes.forEach((lane, k) => {
      to.fillStyle = this.colors.sunken;
      to.fillRect(LEFT, this.laneTop(k), width - LEFT - 8, LANE);
      to.fillStyle = this.colors.text;
      to.textAlign = "right";
      to.fillText(lane === "compute" ? lane : `${lane}`, LEFT - 10, this.laneTop(k) + LANE / 2, LEFT - 14);
    });
  },

  paintPhases(to) {
    to.textAlign = "left";
    for (const { phase, start, end } of this.phases) {
      const left = Math.max(LEFT, this.x(start)),
        right = this.x(end);
      if (right < LEFT || right - left < 1) continue;
      to.fillStyle = this.colors[phase] || this.colors.other;
      to.fillRect(left, TOP + PHASES - 5, right - left, 2);
      if (right - left > to.measureText(phase).width + 2) to.fillText(phase, left + 1, TOP + 5);
    }
  },

  /** Bars; those that are too narrow to be seen apart are drawn as one. */
  paintSpans(to) {
    const reached = this.lanes.map(() => -1);
    for (const span of this.spans) {
      const left = this.x(span.start),
        right = this.x(span.end);
      if (right < LEFT || left > this.width()) continue;
      if (right < reached[span.lane] && span.node !== this.selected) continue;
      const wide = Math.max(1, right - left),
        top = this.laneTop(span.lane);
      to.fillStyle = this.colors[span.transfer ? "communication" : span.phase] || this.colors.other;
      to.fillRect(left, top, wide, LANE);
      if (span.exposed) {
        to.fillStyle = this.colors.exposed;
        to.fillRect(left + wide * (1 - span.exposed), top, wide * span.exposed, LANE);
      }
      reached[span.lane] = left + Math.max(1, wide);
      this.paintSpan(to, span, left, wide, top);
    }
  },

  paintSpan(to, span, left, wide, top) {
    if (wide > 12) {
      to.fillStyle = this.colors.surface;
      to.fillRect(left + wide - 1, top, 1, LANE);
    }
    if (span.node === this.selected) {
      to.strokeStyle = this.colors.text;
      to.lineWidth = 2;
      to.strokeRect(left + 1, top + 1, Math.max(1, wide - 2), LANE - 2);
    }
    const from = Math.max(left, LEFT),
      room = left + wide - from - 8;
    if (room < 40) return;
    const one = COLLECTIVES.get(span.node),
      label = one && span.transfer ? `${one.kind} ${one.role}` : span.node;
    to.fillStyle = "#fff";
    to.textAlign = "left";
    to.fillText(fitted(to, label, room), from + 4, top + LANE / 2 + 1);
  },

  paintScale(to, width, height) {
    const step = niceStep((this.to - this.from) / Math.max(2, Math.floor((width - LEFT) / 110)));
    to.textAlign = "center";
    to.fillStyle = this.colors.muted;
    for (let k = Math.ceil(this.from / step); k * step <= this.to; k++) {
      const x = this.x(k * step);
      to.globalAlpha = 0.35;
      to.fillRect(x, TOP + PHASES, 1, height - SCALE - TOP - PHASES);
      to.globalAlpha = 1;
      if (x < width - 24) to.fillText(k ? tickText(k * step) : "0", x, height - SCALE / 2 + 2);
    }
  },

  paintPointer(to) {
    if (!this.pointer) return;
    const { x } = this.pointer;
    if (this.drag) {
      to.fillStyle = this.colors.accent;
      to.globalAlpha = 0.2;
      to.fillRect(Math.min(x, this.drag), TOP, Math.abs(x - this.drag), this.height() - SCALE);
      to.globalAlpha = 1;
    }
    to.fillStyle = this.colors.accent;
    to.fillRect(x, TOP, 1, this.height() - SCALE - TOP);
  },

  /** What runs in a lane at a position, within two pixels. */
  hit(x, y) {
    const lane = this.lanes.findIndex((_, k) => y >= this.laneTop(k) && y <= this.laneTop(k) + LANE);
    const near = 2 * (this.seconds(1) - this.seconds(0)),
      at = this.seconds(x);
    let found = null;
    for (const span of this.spans) {
      if (span.start > at + near) break;
      if (span.lane === lane && span.end >= at - near && (!found || span.end - span.start > 0)) found = span;
      if (found === span && span.start <= at && span.end >= at) break;
    }
    return found;
  },

  /** Show this stretch of the step, inside of the whole. */
  show(from, to) {
    const length = Math.min(this.whole, Math.max(to - from, this.whole / 1e5));
    this.from = Math.min(Math.max(0, from), this.whole - length);
    this.to = this.from + length;
    this.draw();
  },

  zoom(factor, around) {
    const middle = around ?? (this.from + this.to) / 2;
    this.show(middle - (middle - this.from) * factor, middle + (this.to - middle) * factor);
  },

  /** What a node does, the longest first: a collective has a launch, too. */
  spansOf(name) {
    return this.spans.filter((each) => each.node === name).sort((a, b) => b.end - b.start - (a.end - a.start));
  },

  /** Outline what a node does; bring it into view. */
  select(name) {
    this.selected = name;
    const [span] = this.spansOf(name);
    const length = this.to - this.from;
    if (span && (span.end < this.from || span.start > this.to)) this.show(span.start - length / 2, span.start +
      length / 2);
    this.draw();
  },

  listen() {
    const canvas = this.canvas,
      position = (event) => ({ x: event.offsetX, y: event.offsetY });
    canvas.addEventListener("pointerdown", (event) => {
      this.drag = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => { this.pointer = position(event);
      this.hover(event); });
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => { this.pointer = null;
      byId("tip").hidden = true;
      this.draw(); });
    canvas.addEventListener("dblclick", () => this.show(0, this.whole));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.seconds(event.offsetX));
    }, { passive: false });
    for (const button of document.querySelectorAll("[data-zoom]")) {
      const does = { in: () => this.zoom(0.5), out: () => this.zoom(2), all: () => this.show(0, this.whole) };
      button.addEventListener("click", does[button.dataset.zoom]);
    }
  },

  release(event) {
    const from = this.drag,
      to = event.offsetX;
    this.drag = null;
    if (from !== null && Math.abs(to - from) > 6) {
      this.show(this.seconds(Math.min(from, to)), this.seconds(Math.max(from, to)));
      return;
    }
    const span = this.hit(event.offsetX, event.offsetY);
    if (span && !span.bar) select(span.node, LAST);
    this.draw();
  },

  hover(event) {
    this.draw();
    const at = Math.max(0, this.seconds(event.offsetX)),
      span = this.hit(event.offsetX, event.offsetY);
    const used = this.curves.map(({ device, changes }) => `${bytesText(valueAt(changes, at))} on ${device}`);
    const one = span && span.transfer && COLLECTIVES.get(span.node);
    const what = !span ? timeText(at) : `${span.node}: ${timeText(span.end - span.start)}` +
      (one ? `, ${timeText(one.exposed)} exposed; ${one.kind} over ${one.axis}, ${bytesText(one.bytes)}. ${one.why}` :
        "") +
      (span.module ? ` (${span.module})` : "");
    showTip(event, `${what} \u00b7 in use: ${used.join(", ")}`);
  },

  key(event) {
    const step = (this.to - this.from) / 5;
    const does = {
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.show(0, this.whole),
      ArrowLeft: () => this.show(this.from - step, this.to - step),
      ArrowRight: () => this.show(this.from + step, this.to + step),
    } [event.key];
    if (!does) return;
    event.preventDefault();
    does();
  },
};

/** "1.5 ms" for 1.50 ms. */
function tickText(seconds) {
  return timeText(seconds).replace(/\.0+ |(\.\d*?)0+ /, "$1 ");
}

/** 1, 2 or 5 times a power of ten, not below what is given. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least || 1));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

/** The text, or as much of it as there is room for. */
function fitted(to, text, room) {
  if (to.measureText(text).width <= room) return text;
  const letters = Math.floor((text.length * room) / to.measureText(text).width) - 1;
  return letters > 2 ? `${text.slice(0, letters)}\u2026` : "";
}

function showTip(event, text) {
  const tip = byId("tip");
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(8, left)}px`;
  const isLow = event.clientY + 18 + tip.offsetHeight > innerHeight;
  tip.style.top = `${isLow ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
}
