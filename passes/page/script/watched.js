// Statistics of named values over the calls of a run: a chart for each, a line for each value.

const CHART = { width: 640, height: 190, left: 64, right: 12, top: 14, bottom: 22 };
const MOST_NAMES = 8; // that are listed beside a chart, those with the largest last values

/** An element of a picture. */
function shape(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const figureText = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(3))) : String(value));

/** The scale of the values, logarithmic where they are positive and far apart: (value to pixels, ticks). */
function scaleOf(values) {
  const { height, top, bottom } = CHART;
  let low = Math.min(...values), high = Math.max(...values);
  const isLog = low > 0 && high / low > 50;
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const place = isLog ? Math.log10 : (value) => value;
  const [from, to] = [place(low), place(high)];
  const y = (value) => height - bottom - ((place(value) - from) / (to - from)) * (height - bottom - top);
  const ticks = [];
  if (isLog) for (let power = Math.ceil(from); power <= to; power++) ticks.push(10 ** power);
  return [y, ticks.length > 1 && ticks.length < 7 ? ticks : [low, high]];
}

/** One statistic: its lines, the names of the largest, and what is not finite. */
class Chart {
  constructor({ statistic, calls, rows }) {
    this.calls = calls;
    const number = (value) => (value === null ? null : Number(value));
    this.rows = rows.map(([name, values]) => ({ name, values: values.map(number) }));
    const finite = this.rows.flatMap((row) => row.values.filter((each) => each !== null && Number.isFinite(each)));
    [this.y, this.ticks] = scaleOf(finite.length ? finite : [0, 1]);
    const span = Math.max(calls.at(-1) - calls[0], 1);
    this.x = (call) => CHART.left + ((call - calls[0]) / span) * (CHART.width - CHART.left - CHART.right);
    this.lines = new Map();
    this.element = element("div.watched", null, element("h3", null, statistic),
      element("div.chart", null, this.picture(statistic), this.names()), this.lost());
  }

  picture(statistic) {
    const { width, height, left, right, bottom } = CHART;
    const label = `${statistic} of ${plural(this.rows.length, "value")}, from call ${this.calls[0]} on`;
    const made = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    for (const tick of this.ticks) {
      made.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: this.y(tick), y2: this.y(tick) }),
        shape("text", { x: left - 6, y: this.y(tick) + 4, "text-anchor": "end" }, figureText(tick)));
    }
    made.append(shape("text", { x: left, y: height - 6 }, `call ${countText(this.calls[0])}`),
      shape("text", { x: width - right, y: height - 6, "text-anchor": "end" }, countText(this.calls.at(-1))));
    for (const row of this.rows) {
      const line = shape("path", { d: this.path(row.values) });
      this.lines.set(row.name, line);
      made.append(line);
    }
    this.mark = shape("circle", { r: 3, visibility: "hidden" });
    made.append(this.mark);
    made.addEventListener("mousemove", (event) => this.point(made, event));
    made.addEventListener("mouseleave", () => this.choose(null));
    return made;
  }

  /** A line through the finite values; a lost one leaves a gap, and one alone is a dot. */
  path(values) {
    const isPoint = (value) => value !== null && value !== undefined && Number.isFinite(value);
    return values.map((value, k) => {
      if (!isPoint(value)) return "";
      const at = `${this.x(this.calls[k]).toFixed(1)},${this.y(value).toFixed(1)}`;
      return isPoint(values[k - 1]) ? `L${at}` : `M${at}h0`;
    }).join("");
  }

  names() {
    const last = (row) => row.values.findLast((each) => each !== null);
    const size = (row) => (Number.isFinite(last(row)) ? Math.abs(last(row)) : Infinity);
    const sorted = [...this.rows].sort((a, b) => size(b) - size(a));
    const items = sorted.slice(0, MOST_NAMES).map((row) => {
      const show = () => this.choose(row, this.calls.length - 1);
      const hide = () => this.choose(null);
      const events = { onmouseenter: show, onfocus: show, onmouseleave: hide, onblur: hide };
      const name = element("button.link", { type: "button", ...events }, row.name);
      return element("li", null, name, ` ${figureText(last(row))}`);
    });
    if (sorted.length > MOST_NAMES) items.push(element("li.hint", null, `and ${sorted.length - MOST_NAMES} more`));
    this.shown = element("p.hint", { role: "status" }, "");
    return element("div.names", null, element("ul", null, ...items), this.shown);
  }

  /** The first calls whose values are no numbers. */
  lost() {
    const found = this.rows.map((row) => [row, row.values.findIndex((each) => each !== null && !Number.isFinite(each))])
      .filter(([, k]) => k >= 0).sort((a, b) => a[1] - b[1]);
    if (!found.length) return "";
    const texts = found.slice(0, 3).map(([row, k]) => `${row.name} is ${row.values[k]} in call ${this.calls[k]}`);
    if (found.length > 3) texts.push(`${plural(found.length - 3, "more value")} later`);
    return element("p.exposed", null, `${texts.join("; ")}.`);
  }

  /** Show the line nearest to the mouse. */
  point(picture, event) {
    const box = picture.getBoundingClientRect(), zoom = CHART.width / box.width;
    const at = [(event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom];
    const k = this.calls.reduce((best, call, n) =>
      (Math.abs(this.x(call) - at[0]) < Math.abs(this.x(this.calls[best]) - at[0]) ? n : best), 0);
    const away = (row) => Math.abs(this.y(row.values[k]) - at[1]);
    const here = this.rows.filter((row) => row.values[k] !== null && Number.isFinite(row.values[k]));
    this.choose(here.length ? here.reduce((best, row) => (away(row) < away(best) ? row : best)) : null, k);
  }

  choose(row, k) {
    for (const [name, line] of this.lines) line.classList.toggle("chosen", row !== null && name === row.name);
    const value = row === null ? null : row.values[k];
    const isThere = value !== null && Number.isFinite(value);
    this.mark.setAttribute("visibility", isThere ? "visible" : "hidden");
    if (isThere) {
      this.mark.setAttribute("cx", this.x(this.calls[k]));
      this.mark.setAttribute("cy", this.y(value));
    }
    this.shown.textContent = value === null ? "" : `${row.name}: ${figureText(value)} in call ${this.calls[k]}`;
  }
}

function startWatched() {
  byId("watched").hidden = byId("to-watched").hidden = !DATA.watched.length;
  byId("charts").replaceChildren(...DATA.watched.map((each) => new Chart(each).element));
}
