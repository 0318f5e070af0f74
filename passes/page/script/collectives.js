// What a step communicates and why: a row for each reason, which unfolds into the single collectives.

const openTraffic = new Set();

function startCollectives() {
  if (!REPORT.traffic.length) {
    byId("traffic").replaceChildren(element("p", null, "One step communicates nothing."));
    return;
  }
  const headings = ["collective", "axis", "why", "#count", "#bytes", "#time", "#exposed", ...(REPORT.measured ? [
    "#measured"
  ] : [])];
  const head = element("thead", null, element("tr", null, ...headings.map((text) =>
    element(text[0] === "#" ? "th.number" : "th", null, text.replace("#", "")))));
  const bodies = byCost(REPORT.traffic).flatMap((row) => [trafficRow(row), ...(openTraffic.has(row) ? [singleRows(
    row)] : [])]);
  byId("traffic").replaceChildren(element("div.scroll", null, element("table", null, head, ...bodies)));
}

/** Those first for which compute waits longest. */
const byCost = (rows) => [...rows].sort((a, b) => b.exposed - a.exposed || b.bytes - a.bytes);

function cells(row, first, why, count) {
  return [element("td", null, ...first), element("td", null, element("span.axis", null, row.axis)),
    element("td", null, why, row.by ? element("small", null, ` by ${row.by}`) : null), element("td.number", null,
      count),
    element("td.number", null, bytesText(row.bytes)), element("td.number", null, timeText(row.seconds)),
    element(`td.number${row.exposed > 0 ? ".exposed" : ""}`, null, timeText(row.exposed)),
    ...(REPORT.measured ? [element("td.number", null, timeText(row.measured))] : [])
  ];
}

function trafficRow(row) {
  const toggle = () => {
    openTraffic[openTraffic.has(row) ? "delete" : "add"](row);
    startCollectives();
  };
  const twist = element("button.link.nowrap", { type: "button", "aria-expanded": openTraffic.has(row) },
    element("span.twist", null, openTraffic.has(row) ? "\u25be" : "\u25b8"), row.kind);
  return element("tbody.group", { onclick: toggle }, element("tr", null, ...cells(row, [twist], row.why, countText(row
    .count))));
}

const plainWhy = (why) => why.replace(/( and others)?; \d+ in one$/, "").split(" at ")[0];

/** The collectives of a row, at most 200 of them. */
function singleRows(row) {
  const ones = REPORT.every.filter((one) => one.kind === row.kind && one.axis === row.axis && one.role === row.role &&
    one.dtype === row.dtype && one.by === row.by && plainWhy(one.why) === plainWhy(row.why));
  const made = ones.slice(0, 200).map((one) => {
    const name = element("button.link", { type: "button" }, one.node);
    const serves = one.of.length ?
      `${one.of.slice(0, 2).join(", ")}${one.of.length > 2 ? ` and ${one.of.length - 2} more` : ""}` : one.why;
    return element("tr.one", { "data-node": one.node, onclick: () => select(one.node, LAST) },
      ...cells(one, [name], element("span", null, serves, element("small", null, ` ${moment(one, ones)}`)), ""));
  });
  const rest = ones.length > 200 ? [element("tr", null, element("td", { colspan: 8 },
    `and ${ones.length - 200} more: search the graph`))] : [];
  return element("tbody", null, ...made, ...rest);
}

/** "(backward, 2 of 4)": the phase, and which of those that serve the same in it, one for each micro-batch, say. */
function moment(one, ones) {
  const equal = ones.filter((each) => each.phase === one.phase && each.of.join() === one.of.join());
  const which = one.of.length && equal.length > 1 ? `${equal.indexOf(one) + 1} of ${equal.length}` : "";
  const text = [one.phase, which].filter(Boolean).join(", ");
  return text && `(${text})`;
}

function selectCollective(name) {
  for (const row of document.querySelectorAll("tr.one")) row.classList.toggle("selected", row.dataset.node === name);
}
