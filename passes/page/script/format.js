// Numbers as text, and elements of the page. All text goes in as text, never as HTML.

function bytesText(count) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${unit && count < 100 ? count.toFixed(count < 10 ? 2 : 1) : Math.round(count)} ${units[unit]}`;
}

function timeText(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(seconds >= 0.1 ? 0 : 2)} ms`;
  return `${(seconds * 1e6).toFixed(seconds >= 1e-5 || !seconds ? 0 : 1)} µs`;
}

const countText = (count) => count.toLocaleString("en-US");
const plural = (count, noun) => `${countText(count)} ${noun}${count === 1 ? "" : "s"}`;
const percent = (part, whole) => `${Math.round((100 * part) / (whole || 1))} %`;
const sum = (values) => values.reduce((total, value) => total + value, 0);

/** An element with properties, classes and children, which are elements or text. */
function element(tag, properties, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") made.style.cssText = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/** A table; a heading that begins with "#" is that of a column of numbers. */
function table(headings, rows) {
  const heads = headings.map((text) => element(text[0] === "#" ? "th.number" : "th", null, text.replace(/^#/, "")));
  const body = rows.map((row) => element("tr", null, ...row.map(
    (cell, k) => element(headings[k][0] === "#" ? "td.number" : "td", null, cell))));
  return element("div.scroll", null, element("table", null, element("thead", null, element("tr", null, ...heads)),
    element("tbody", null, ...body)));
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const byId = (id) => document.getElementById(id);
