// Which rank holds which part of an input: a picture of the mesh with the tensor in each cell.

const MOST_CELLS = 64;

const held = {
  search: "",
  selected: null,

  start() {
    if (!DATA.inputs.length) {
      byId("state").remove();
      document.querySelector('nav a[href="#state"]').remove();
      return;
    }
    this.list = new Rows(byId("inputs"), (row) => this.row(row), (row) => this.choose(row));
    byId("search-state").addEventListener("input", (event) => {
      this.search = event.target.value.trim().toLowerCase();
      this.update();
    });
    this.update();
    this.choose(DATA.inputs.find((each) => each.split.some((dim) => dim >= 0)) || DATA.inputs[0]);
  },

  update() {
    this.list.show(DATA.inputs.filter((each) => `${each.role} ${each.name}`.toLowerCase().includes(this.search)));
  },

  row(each) {
    return element(`div.row${each === this.selected ? ".selected" : ""}`, {
        role: "option",
        "aria-selected": each === this.selected,
        style: "padding-left: 8px"
      }, element("span.value", null, each.name),
      element("span.type", null, `${each.dtype}[${each.shape.join(", ")}]`), element("span.comment", null, each
        .role));
  },

  choose(each) {
    this.selected = each;
    this.list.paint();
    const placed = each.placement.map((placement, k) => {
      const axis = (DATA.axes[k] || ["mesh"])[0];
      return each.split[k] >= 0 ? `split along dim ${each.split[k]} over ${axis}` :
        `${placement.startsWith("Partial") ? "pending" : "whole"} over ${axis}`;
    });
    byId("picture").replaceChildren(element("h3", null, `${each.role} `, element("code", null, each.name)),
      element("p", { style: "margin: 0 0 .6rem" }, `${each.dtype}[${each.shape.join(", ")}], ${placed.join(", ")}`),
      this.picture(each));
  },

  picture(each) {
    const sizes = DATA.axes.map(([, size]) => size),
      ranks = sizes.reduce((a, b) => a * b, 1);
    return sizes.length <= 2 && ranks <= MOST_CELLS && Math.max(...sizes, 1) <= 8 ? meshGrid(each, sizes) : partList(
      each, sizes);
  },
};

/** One cell a rank: the first axis downwards, the second one to the right. */
function meshGrid(each, sizes) {
  const [rows, columns] = [sizes[0] || 1, sizes[1] || 1], names = DATA.axes.map(([name]) => name);
  const heads = sizes.length > 1 ? [element("tr", null, element("th"), ...Array.from({ length: columns },
    (_, column) => element("th", null, `${names[1]} ${column}`)))] : [];
  const body = Array.from({ length: rows }, (_, row) => element("tr", null,
    element("th", null, names.length ? `${names[0]} ${row}` : "one rank"), ...Array.from({ length: columns }, (_,
      column) => {
      const spans = partOf(each, sizes, [row, column]);
      return element("td", null, tensorPicture(each.shape, spans), element("span.part", null, partText(each.shape,
        spans)));
    })));
  return element("div.scroll", null, element("table.grid", null, ...heads, ...body));
}

/** For a large mesh: each different part, and how many ranks hold it. */
function partList(each, sizes) {
  const holders = new Map();
  const visit = (coordinates) => {
    if (coordinates.length < sizes.length) {
      for (let k = 0; k < sizes[coordinates.length]; k++) visit([...coordinates, k]);
      return;
    }
    const text = partText(each.shape, partOf(each, sizes, coordinates));
    if (!holders.has(text)) holders.set(text, []);
    holders.get(text).push(coordinates.map((k, axis) => `${DATA.axes[axis][0]} ${k}`).join(" "));
  };
  visit([]);
  const rows = [...holders].slice(0, 100).map(([text, ranks]) => [element("code", null, text),
    `${ranks.slice(0, 6).join("; ")}${ranks.length > 6 ? `; and ${ranks.length - 6} more ranks` : ""}`
  ]);
  return table(["part", "held by"], rows);
}

/** The start and length along each dim of what the rank at these coordinates holds. */
function partOf(each, sizes, coordinates) {
  const spans = each.shape.map((size) => [0, size]);
  each.split.forEach((dim, axis) => {
    if (dim < 0) return;
    const [start, length] = spans[dim], step = Math.ceil(length / sizes[axis]);
    const offset = Math.min(coordinates[axis] * step, length);
    spans[dim] = [start + offset, Math.min(step, length - offset)];
  });
  return spans;
}

function partText(shape, spans) {
  if (spans.some(([, length], dim) => !length && shape[dim])) return "nothing";
  const shown = spans.map(([start, length], dim) => (length === shape[dim] ? ":" : `${start}:${start + length}`));
  return shown.length ? `[${shown.join(", ")}]` : "all";
}

/** The first two dims as a rectangle, with the part filled. */
function tensorPicture(shape, spans) {
  const space = "http://www.w3.org/2000/svg",
    [width, height] = [64, shape.length > 1 ? 44 : 14];
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("width", width + 2);
  svg.setAttribute("height", height + 2);
  svg.setAttribute("aria-hidden", "true");
  const part = (dim, size) => (dim in shape && shape[dim] ? [(spans[dim][0] / shape[dim]) * size, (spans[dim][1] /
    shape[dim]) * size] : [0, size]);
  const [
    [top, tall],
    [left, wide]
  ] = shape.length > 1 ? [part(0, height), part(1, width)] : [
    [0, height], part(0, width)
  ];
  const rectangle = (name, x, y, w, h) => {
    const made = document.createElementNS(space, "rect");
    Object.entries({ class: name, x: x + 1, y: y + 1, width: w, height: h }).forEach(([key, value]) => made
      .setAttribute(key, value));
    svg.append(made);
  };
  rectangle("tensor", 0, 0, width, height);
  rectangle("tensor-part", left, top, wide, tall);
  return svg;
}
