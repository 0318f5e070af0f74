// The memory in use over time, and what it is made of at the peak.

const HOLDS = {
  parameters: "#4a7fbf",
  gathered: "#7fb2d9",
  gradients: "#cf7b4a",
  "optimizer state": "#4b9a6a",
  offloaded: "#8a8f98",
  activations: "#8663b8",
  other: "#b0a160",
  unused: "#9aa1a955",
};

/** The bytes in use at a second. */
function valueAt(changes, second) {
  let low = 0,
    high = changes.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (changes[middle][0] <= second) low = middle + 1;
    else high = middle;
  }
  return low ? changes[low - 1][1] : 0;
}

/** When most is in use, and how much. */
function peakOf(changes) {
  return changes.reduce((most, each) => (each[1] > most[1] ? each : most), [0, 0]);
}

const CURVES = ["memory", "accent", "update", "backward"]; // colors of the devices, in order

/** The curve of each device in a color of its own, and its peak marked; a single one is filled. */
function paintMemory(to, line) {
  const top = line.memoryTop(),
    bottom = top + MEMORY,
    width = line.width();
  const y = (size) => bottom - (size / line.most) * (MEMORY - 16);
  to.fillStyle = line.colors.text;
  to.textAlign = "right";
  to.fillText("memory", LEFT - 10, top + 22);
  to.fillStyle = line.colors.muted;
  to.fillText(bytesText(line.most), LEFT - 10, y(line.most) + 22);
  to.fillText("0", LEFT - 10, bottom - 4);
  to.fillRect(LEFT, bottom, width - LEFT - 8, 1);
  to.save();
  to.beginPath();
  to.rect(LEFT, top, width - LEFT - 8, MEMORY);
  to.clip();
  for (const [k, { changes }] of line.curves.entries()) {
    to.beginPath();
    to.moveTo(LEFT, bottom);
    let last = y(valueAt(changes, line.from));
    to.lineTo(LEFT, last);
    let column = LEFT,
      high = last,
      low = last; // what changes within a pixel is one line from its least to its most
    const finish = () => {
      to.lineTo(column, high);
      to.lineTo(column, low);
      to.lineTo(column, last);
    };
    for (const [second, size] of changes) {
      if (second < line.from || second > line.to) continue;
      const x = line.x(second);
      if (x - column >= 0.5) {
        finish();
        to.lineTo(x, last);
        [column, high, low] = [x, last, last];
      }
      last = y(size);
      [high, low] = [Math.min(high, last), Math.max(low, last)];
    }
    finish();
    to.lineTo(width - 8, last);
    to.strokeStyle = line.colors[CURVES[k % CURVES.length]];
    to.lineWidth = 1.5;
    to.stroke();
    if (line.curves.length > 1) continue;
    to.lineTo(width - 8, bottom);
    to.fillStyle = line.colors["memory-soft"];
    to.fill();
  }
  for (const { device, changes } of line.curves) paintPeak(to, line, device, changes, y);
  to.restore();
}

function paintPeak(to, line, device, changes, y) {
  const [second, size] = peakOf(changes), x = line.x(second);
  if (second < line.from || second > line.to || size < line.most / 20) return;
  to.fillStyle = line.colors.exposed;
  to.beginPath();
  to.arc(x, y(size), 4, 0, 2 * Math.PI);
  to.fill();
  const memory = REPORT.memory[device], where = line.curves.length > 1 ? ` on ${device}` : "";
  const label = `peak${where}: ${bytesText(size)} in use${memory ? ` at ${memory.at}` : ""}`;
  const rooms = [x - 10 - LEFT, line.width() - 8 - x - 10], wide = to.measureText(label).width;
  const right = rooms[1] >= wide || rooms[1] >= rooms[0];
  to.fillStyle = line.colors.text;
  to.textAlign = right ? "left" : "right";
  to.fillText(withoutFirstNames(to, label, rooms[Number(right)]), right ? x + 10 : x - 10, y(size) - 7);
}

/** A label that ends with the name of a module, without as many of the first names as there is no room for. */
function withoutFirstNames(to, label, room) {
  while (to.measureText(label).width > room && /[A-Za-z_]\w*\.\w/.test(label)) {
    label = label.replace(/\u2026?[A-Za-z_]\w*\.(?=\w)/, "\u2026");
  }
  return fitted(to, label, room);
}

/** A device's peak: what it is made of, what is largest then, and what would shrink it. */
function deviceMemory(device, memory) {
  const roles = Object.entries({ ...memory.roles, unused: memory.unused }).filter(([, count]) => count > 0)
    .sort((a, b) => b[1] - a[1]);
  const meter = element("div.meter", { role: "img", "aria-label": roles.map(([role, count]) =>
        `${role} ${percent(count, memory.peak)}`).join(", ") },
    ...roles.map(([role, count]) => element("i", {
      style: `width: ${(100 * count) / memory.peak}%; background: ${HOLDS[role]}`,
      title: `${role}: ${bytesText(count)}`
    })));
  const named = (role) => element("span.nowrap", null, element("span.swatch", { style: `background: ${HOLDS[role]}` }),
    role);
  const made = table(["holds", "#bytes", "#of the peak"],
    roles.map(([role, count]) => [named(role), bytesText(count), percent(count, memory.peak)]));
  const largest = table(["largest then", "#bytes", "holds"], memory.largest.map((each) => [
    element("code", null, each.name), bytesText(each.bytes), named(each.role)
  ]));
  const shrinks = table(["what would shrink it", "#of the peak", "how"], DATA.advice[device].map((each) => [
    named(each.role), percent(each.bytes, memory.peak),
    element("span", null, each.text, each.saves ? element("b", null, ` (up to ${bytesText(each.saves)} less)`) :
      null)
  ]));
  const arena = memory.arena ? ` ${bytesText(memory.arena)} are an arena that is planned ahead` : "";
  const unused = arena && memory.unused ? `, of which ${bytesText(memory.unused)} are not in use then` : "";
  return [
    element("p", null, element("b", null, `${bytesText(memory.peak)} on ${device}`), `, at `,
      element("code", null, memory.at), whenPeak(device), ".", arena, unused, arena ? "." : ""),
    meter, element("div.two", null, element("div", null, made), element("div", null, largest)),
    element("div", { style: "margin-top: 1rem" }, shrinks),
  ];
}

/** " in backward, 8.31 ms into the step", as far as it is known. */
function whenPeak(device) {
  const curve = timeline.curves.find((each) => each.device === device);
  if (!curve) return "";
  const [second] = peakOf(curve.changes);
  const phase = [...timeline.phases].reverse().find((each) => each.start <= second);
  return `${phase ? ` in ${phase.phase}` : ""}, ${timeText(second)} into the step`;
}

function startMemory() {
  const devices = Object.entries(REPORT.memory);
  byId("devices").replaceChildren(...devices.flatMap(([device, memory]) => deviceMemory(device, memory)));
}
