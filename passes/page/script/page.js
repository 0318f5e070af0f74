// The page as a whole: the summary, the table of passes, and the start of all parts.

function card(title, figure, ...content) {
  return element("div.card", null, element("h2", null, title), element("p.figure", null, figure), ...content);
}

function startSummary() {
  const { traffic, estimated, memory } = REPORT;
  const count = sum(traffic.map((row) => row.count)),
    bytes = sum(traffic.map((row) => row.bytes));
  const axes = [...new Set(traffic.map((row) => row.axis))].map((axis) => {
    const rows = traffic.filter((row) => row.axis === axis);
    return element("li", null, element("span.axis", null, axis),
      ` ${bytesText(sum(rows.map((row) => row.bytes)))} in ${plural(sum(rows.map((row) => row.count)), "collective")}`
      );
  });
  const cards = [card("What does this step communicate?", count ? bytesText(bytes) : "nothing",
    count ? element("p", null, `of each rank's data go into ${plural(count, "collective")}`) : "", element("ul",
      null, ...axes))];
  if (count) cards.push(whyCard(traffic, estimated));
  const devices = Object.entries(memory).sort((a, b) => b[1].peak - a[1].peak);
  if (devices.length) cards.push(peakCard(...devices[0]), shrinkCard(...devices[0]));
  byId("summary").replaceChildren(...cards);
}

/** Long paths of modules with their last two names only: `…attention.out`. */
const withLastNames = (why) => why.replace(/[\w*]+(?:\.[\w*]+){2,}/g, (path) =>
  (path.length > 16 ? `\u2026\u2060${path.split(".").slice(-2).join(".")}` : path));

/** The reasons, those first for which compute waits longest. */
function whyCard(traffic, estimated) {
  const sorted = byCost(traffic);
  const items = sorted.slice(0, 3).map((row) => element("li", null, withLastNames(row.why || row.role),
    element("small", null,
      ` \u2014 ${row.count}\u00d7, ${bytesText(row.bytes)}${row.exposed ? `, ${timeText(row.exposed)} exposed` : ""}`
      )));
  if (sorted.length > 3) items.push(element("li", null, element("a", { href: "#collectives" },
    `and ${sorted.length - 3} more reasons`)));
  const figure = estimated ? `${timeText(estimated.exposed)} of ${timeText(estimated.seconds)}` : plural(sorted.length,
    "reason");
  return card("Why, and what does it cost?", figure,
    element("p", null, estimated ? "of the step waits for communication, for" : ""), element("ul", null, ...items));
}

function peakCard(device, memory) {
  const [role, count] = Object.entries(memory.roles).sort((a, b) => b[1] - a[1])[0];
  return card("Where is the peak of memory?", bytesText(memory.peak),
    element("p", null, `on ${device}, at `, element("code", null, memory.at), `${whenPeak(device)}`),
    element("p", null, `Most of it: ${role}, ${bytesText(count)} (${percent(count, memory.peak)}). `,
      memory.unused > memory.peak / 50 ? `${bytesText(memory.unused)} are reserved and not in use then. ` : "",
      element("a", { href: "#memory" }, "What else lives then")));
}

function shrinkCard(device, memory) {
  const best = DATA.advice[device].filter((each) => each.role !== "unused");
  const items = best.slice(0, 2).map((each, k) => element("li", null,
    k ? element("b", null, `${each.role}: ${percent(each.bytes, memory.peak)}. `) : "", each.text, each.saves ?
    ` (up to ${bytesText(each.saves)} less)` : ""));
  const figure = best.length ? `${best[0].role}: ${percent(best[0].bytes, memory.peak)}` : "nothing large";
  return card("What would shrink it?", figure, element("ul", null, ...items));
}

function startCompiling() {
  const passes = REPORT.passes || [],
    idle = passes.filter((each) => each.did === "nothing to do").map((each) => each.stage);
  const link = (stage) => {
    const k = STAGES.findIndex((each) => each.name === stage);
    const show = () => { graph.to(k);
      byId("only-changes").checked = graph.onlyChanges = true;
      graph.update();
      byId("graph").scrollIntoView(); };
    return k < 0 ? stage : element("button.link", { type: "button", onclick: show }, stage);
  };
  const rows = passes.filter((each) => each.did !== "nothing to do").map((each) => [link(each.stage), each.did,
    countText(each.nodes_before), countText(each.nodes_after), timeText(each.seconds)
  ]);
  const seconds = Object.entries(REPORT.seconds).map(([stage, value]) => `${stage} ${value.toFixed(2)} s`).join(", ");
  byId("stages").replaceChildren(
    seconds ? element("p", null, `Seconds of compiling: ${seconds}.`) : "",
    REPORT.reason ? element("p", null, `Compiled because of ${REPORT.reason}.`) : "",
    ...REPORT.notes.map((note) => element("p", null, element("b", null, "Note: "), note)),
    rows.length ? table(["pass", "did", "#nodes before", "#after", "#time"], rows) : "",
    idle.length ? element("p.hint", null, `Nothing to do: ${idle.join(", ")}.`) : "");
}

byId("mesh").textContent = `mesh ${REPORT.mesh}` + (REPORT.estimated ?
    ` \u00b7 one step, estimated: ${timeText(REPORT.estimated.seconds)}` : "") +
  (REPORT.measured ?
    ` \u00b7 measured: ${timeText(REPORT.measured.seconds)}` :
    "");
timeline.start();
startSummary();
startCollectives();
startMemory();
emptyDetails();
graph.start();
held.start();
startWatched();
startCompiling();
document.body.dataset.ready = "yes";
requestAnimationFrame(() => performance.mark("ready"));
if (LAST >= 0) warmUp();
