// What is known of one value: reason, code, placement, source line, time, what it reads and what reads it.

/** Show a value of a stage everywhere: in the details, in the graph, in the timeline. */
function select(name, stage, item) {
  graph.selected = name;
  if (LAST >= 0 && !item) graph.reveal(name, stage);
  else if (LAST >= 0) graph.list.paint();
  timeline.select(name);
  selectCollective(name);
  const each = item ? item.each : LAST >= 0 ? valuesOf(stage).get(name) : undefined;
  showDetails(name, each, stage, item || (graph.list && graph.list.rows[graph.list.current] || {}).item);
}

function showDetails(name, each, stage, item) {
  const one = stage === LAST || LAST < 0 ? COLLECTIVES.get(name) : undefined;
  const close = element("button.close", { type: "button", title: "Close", "aria-label": "Close",
    onclick: emptyDetails }, "\u00d7");
  byId("details").replaceChildren(element("div", null, close, element("h2", null, name),
    one ? reason(one) : each && each.comment ? element("p.reason", null, each.comment) : "",
    element("dl", null, ...entries(name, each, stage, item, one))));
}

function emptyDetails() {
  graph.selected = null;
  if (graph.list) graph.list.paint();
  timeline.select("");
  byId("details").replaceChildren(element("div.empty", null, element("h3", null, "Details"),
    element("p", { style: "margin: 0; font-size: .88rem" },
      "Click a bar of the timeline, a collective, or a value of the graph: what is known of it appears here.")));
}

/** Why a collective is there. */
function reason(one) {
  const of = one.of.length ?
    `For ${one.of.slice(0, 4).join(", ")}${one.of.length > 4 ? ` and ${one.of.length - 4} more` : ""}.` : "";
  return element("div.reason", { id: "reason" },
    element("b", null, one.why || `${one.kind} of ${one.role}`), element("div", null, `${one.kind} over `,
      element("span.axis", null, one.axis),
      ` of ${bytesText(one.bytes)} ${one.dtype}${one.by ? `, by ${one.by}` : ""}. ${of}`));
}

function entries(name, each, stage, item, one) {
  const found = [];
  const entry = (title, ...content) => {
    if (content.some((part) => part && (part.length !== 0))) found.push(element("dt", null, title), element("dd",
      null, ...content));
  };
  if (each) entry("Code", element("pre", null, each.code));
  if (item && item.mark && item.each === each) entry(`In stage ${STAGES[stage].name}`, ...changed(item));
  entry("Line", lineOf(each, one));
  entry("Phase and module", [each ? each.phase : one && one.phase, each ? each.module : one && one.module].filter(
    Boolean).join(", "));
  if (each) entry("Shape on this rank", element("span.mono", null, each.type));
  entry("Placement", placementOf(each));
  entry("Estimated time", timeOf(name, one, stage));
  entry("Measured time", measuredOf(name, one, stage));
  if (each) {
    entry("Reads", links(readsOf(each, stage), stage));
    entry("Read by", each.role === "output" ? "" : links(usersOf(name, stage).map((user) => user.role === "output" ?
      `output: ${user.comment}` : user.name), stage));
    entry("Stages", lifeOf(each));
  }
  return found;
}

const lineOf = (each, one) => (one && one.line) || (each && each.line) || "";

function placementOf(each) {
  if (!each) return "";
  const written = /: \w+\[[\d, ]*\] as (.*?)(?:, (?:updated|in ).*)?$/.exec(each.comment);
  const parts = (each.placement || (each.role && written && written[1]) || "").match(/\w+\([^)]*\)/g) || [];
  return parts.map((part, k) => `${part} over ${(DATA.axes[k] || [`axis ${k}`])[0]}`).join(", ");
}

function timeOf(name, one, stage) {
  const span = stage === LAST || LAST < 0 ? timeline.spansOf(name)[0] : undefined;
  if (!span) return "";
  const hidden = one && one.behind.length ?
    `; meanwhile runs ${one.behind.map(([module, seconds]) => `${module} (${timeText(seconds)})`).join(", ")}` : "";
  const exposed = one ? `, ${timeText(one.exposed)} exposed${one.cause ? ` because of ${one.cause}` : ""}${hidden}` : "";
  return `${timeText(span.end - span.start)}, from ${timeText(span.start)} on${exposed}`;
}

/** What a node, or a collective with its wait, took in the calls that were measured. */
function measuredOf(name, one, stage) {
  const seconds = REPORT.measured && stage === LAST ? (one ? one.measured : REPORT.measured.nodes[name]) : undefined;
  return seconds === undefined || seconds === null ? "" :
    `${timeText(seconds)}, the median of ${plural(REPORT.measured.calls, "call")}`;
}

function changed({ mark, before, note }) {
  const kind = MARKS[mark];
  if (note) return [`${kind}: ${note}`];
  if (mark !== "~") return [kind];
  return ["changed; before:", element("pre", null, statement(before).code)];
}

/** Buttons that lead to other values. */
function links(names, stage) {
  const shown = names.slice(0, 12).flatMap((name, k) => [k ? ", " : "", valuesOf(stage).has(name) ?
    element("button.link.mono", { type: "button", onclick: () => select(name, stage) }, name) : name
  ]);
  return element("span", null, ...shown, names.length > 12 ? ` and ${names.length - 12} more` : names.length ? "" :
    "none");
}

/** The first and the last stage that have a value of this name; a click leads there. */
function lifeOf(each) {
  if (each.role === "output") return "";
  if (!life.has(each.name)) return "";
  const link = (k) => element("button.link", { type: "button", onclick: () => select(each.name, k) }, STAGES[k].name);
  const [first, last] = life.get(each.name);
  return element("span", null, "from ", link(first), " to ", link(last));
}
