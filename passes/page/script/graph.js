// The graph of one stage, folded by phase and module, with the changes that the stage made.

const MARKS = { "+": "added", "-": "removed", "~": "changed", ">": "moved" };

const graph = {
  stage: LAST,
  search: "",
  onlyChanges: false,
  open: new Set(),
  folded: new Set(),
  selected: null,

  start() {
    if (LAST < 0) {
      byId("graph").replaceChildren(element("h2", null, "Graph"),
        element("p", null, "There are no graphs here: a report that was read from a file has none."));
      return;
    }
    this.list = new Rows(byId("rows"), (row) => this.row(row), (row, how) => this.choose(row, how));
    const slider = byId("stage");
    slider.max = LAST;
    slider.addEventListener("input", () => this.to(Number(slider.value)));
    byId("previous").addEventListener("click", () => this.to(this.stage - 1));
    byId("next").addEventListener("click", () => this.to(this.stage + 1));
    byId("search").addEventListener("input", (event) => this.find(event.target.value));
    byId("search").addEventListener("keydown", (event) => { if (event.key === "Enter") this.nextMatch(); });
    byId("only-changes").addEventListener("change", (event) => {
      this.onlyChanges = event.target.checked;
      this.update();
    });
    byId("fold").addEventListener("click", () => this.all(false));
    byId("unfold").addEventListener("click", () => this.all(true));
    this.to(LAST);
  },

  /** Go to a stage. */
  to(stage) {
    this.stage = Math.max(0, Math.min(LAST, stage));
    byId("stage").value = this.stage;
    const { name, did, changes } = STAGES[this.stage];
    byId("stage").setAttribute("aria-valuetext", name);
    const counts = Object.entries(MARKS).map(([mark, kind]) => [kind, changes.filter((each) => each[0] === mark)
      .length
    ]);
    const chips = counts.filter(([, count]) => count)
      .map(([kind, count]) => element(`span.chip.${kind}`, null, `${countText(count)} ${kind}`));
    byId("stage-name").replaceChildren(element("b", null, name), did ? ` \u2014 ${did}` : "", ...chips,
      chips.length || !this.stage ? "" : " \u2014 changes nothing");
    byId("count").textContent =
      `${plural(numbersOf(this.stage).length, "value")} after ${name.slice(3).replaceAll("_", " ")}`;
    this.update();
  },

  find(text) {
    this.search = text.trim().toLowerCase();
    this.folded.clear();
    this.update();
  },

  all(open) {
    this.open.clear();
    this.folded.clear();
    const visit = (group) => group.children.forEach((each) => {
      if (each.children) {
        (open ? this.open : this.folded).add(each.key);
        visit(each); }
    });
    visit(this.tree());
    this.update();
  },

  /** The statements of the stage with marks, and in between those that it removed. */
  items() {
    if (this.itemsOf === this.stage) return this.lastItems;
    const changes = new Map(),
      items = [];
    for (const change of STAGES[this.stage].changes) {
      const key = change[0] === "-" ? `-${change[2]}` : change[2];
      changes.set(key, [...(changes.get(key) || []), change]);
    }
    const numbers = numbersOf(this.stage);
    for (let k = 0; k <= numbers.length; k++) {
      for (const [, before] of changes.get(`-${k}`) || []) items.push({ each: statement(before), mark: "-",
        note: "" });
      if (k === numbers.length) break;
      const [mark, before, , note] = (changes.get(k) || [])[0] || ["", -1, k, 0];
      items.push({ each: statement(numbers[k]), mark, before, note: DATA.graph.texts[note] });
    }
    [this.itemsOf, this.lastItems] = [this.stage, items];
    return items;
  },

  shown() {
    const words = this.search.split(/\s+/).filter(Boolean);
    return this.items().filter(({ each, mark }) => (mark || !this.onlyChanges) &&
      words.every((word) => searched(each).includes(word)));
  },

  /** The tree of what is shown now. */
  tree() {
    const key = `${this.stage} ${this.onlyChanges} ${this.search}`;
    if (this.treeKey !== key)[this.treeKey, this.lastTree] = [key, this.grow()];
    return this.lastTree;
  },

  /** Groups of groups by phase and by the parts of the module's name. */
  grow() {
    const root = { children: [], count: 0, marks: {}, depth: -1 },
      groups = new Map();
    const group = (key, label, parent) => {
      if (!groups.has(key)) {
        const made = { key, label, children: [], count: 0, marks: {}, depth: parent.depth + 1 };
        groups.set(key, made);
        parent.children.push(made);
      }
      return groups.get(key);
    };
    const paths = new Map();
    const pathTo = (phase, module) => {
      const path = [root, group(phase, phase || "before the first phase", root)];
      for (const part of module ? module.split(".") : []) {
        const above = path[path.length - 1];
        path.push(group(`${above.key}/${part}`, part, above));
      }
      return path;
    };
    for (const item of this.shown()) {
      const { phase, module } = item.each, key = `${phase}/${module}`;
      if (!paths.has(key)) paths.set(key, pathTo(phase, module));
      const path = paths.get(key);
      path[path.length - 1].children.push(item);
      for (const above of path) {
        above.count += 1;
        if (item.mark) above.marks[item.mark] = (above.marks[item.mark] || 0) + 1;
      }
    }
    const order = ["inputs", "", "forward", "backward", "update", "outputs"];
    root.children.sort((a, b) => order.indexOf(a.key) - order.indexOf(b.key));
    root.children = root.children.map((phase) => ({ ...phase, children: phase.children.map((each) => joined(each,
        1)) }));
    return root;
  },

  isOpen(group) {
    if (this.search || this.onlyChanges) return !this.folded.has(group.key);
    return this.open.has(group.key) || (group.depth === 0 && group.count < 12 && !this.folded.has(group.key));
  },

  /** Show the rows of all groups that are open. */
  update() {
    const rows = [],
      tree = this.tree();
    const visit = (group, label) => {
      for (const child of group.children) {
        if (!child.children) rows.push({ item: child, depth: group.depth + 1 });
        else {
          rows.push({ group: child, depth: child.depth });
          if (this.isOpen(child)) visit(child);
        }
      }
    };
    visit(tree);
    byId("matches").textContent = this.search || this.onlyChanges ? plural(tree.count, "value") : "";
    this.list.show(rows);
  },

  row({ group, item, depth }) {
    return group ? this.groupRow(group, depth) : this.valueRow(item, depth);
  },

  groupRow(group, depth) {
    const chips = Object.entries(group.marks).map(([mark, count]) =>
      element(`span.chip.${MARKS[mark]}`, null, `${mark === "-" ? "\u2212" : mark}${count}`));
    return element("div.row", {
        role: "treeitem",
        "aria-expanded": this.isOpen(group),
        "aria-level": depth + 1,
        style: `padding-left: ${8 + depth * 18}px`
      },
      element("span.twist", null, this.isOpen(group) ? "\u25be" : "\u25b8"), group.label,
      element("span.count", null, countText(group.count)), ...chips);
  },

  valueRow({ each, mark, note }, depth) {
    const kind = mark ? `.${MARKS[mark]}` : "",
      selected = this.selected === each.name ? ".selected" : "";
    const dot = COLLECTIVES.has(each.name) || /^(c10d|transport)\.(?!wait)/.test(each.expression) ? element(
      "span.dot", null, "\u25cf ") : null;
    return element(`div.row${kind}${selected}`, {
        role: "treeitem",
        "aria-level": depth + 1,
        style: `padding-left: ${8 + depth * 18}px`
      },
      element("span.mark", null, mark === "-" ? "\u2212" : mark), dot, element("span.value", null, each.name),
      element("span.type", null, each.type), element("span.code", null, each.expression),
      note ? element("span.note", null, note) : null, each.comment ? element("span.comment", null, each.comment) :
      null);
  },

  choose({ group, item }, how) {
    if (item) {
      if (how === "toggle") select(item.each.name, this.stage, item);
      return;
    }
    const opens = how === "open" || (how === "toggle" && !this.isOpen(group));
    this.open[opens ? "add" : "delete"](group.key);
    this.folded[opens ? "delete" : "add"](group.key);
    this.update();
  },

  nextMatch() {
    const k = this.list.rows.findIndex((row, place) => row.item && place > this.list.current);
    this.list.go(k < 0 ? this.list.rows.findIndex((row) => row.item) : k, true);
  },

  /** Unfold what a value stands in, and bring it into view. */
  reveal(name, stage) {
    if (stage !== this.stage) this.to(stage);
    const each = valuesOf(stage).get(name);
    if (!each) return;
    let key = each.phase;
    this.open.add(key);
    for (const part of each.module ? each.module.split(".") : []) this.open.add(key += `/${part}`);
    const isShown = () => this.list.rows.findIndex((row) => row.item && row.item.each.name === name && row.item
      .mark !== "-");
    this.update();
    if (isShown() < 0) {
      this.search = byId("search").value = "";
      this.onlyChanges = byId("only-changes").checked = false;
      this.update();
    }
    this.list.go(isShown(), false);
  },
};

/** A group in the place of a chain of groups that have nothing else: `blocks.0.mlp`. */
function joined(group, depth) {
  if (!group.children) return group;
  let [last, label] = [group, group.label];
  while (last.children.length === 1 && last.children[0].children) {
    [last] = last.children;
    label += `.${last.label}`;
  }
  return { ...last, label, depth, children: last.children.map((child) => joined(child, depth + 1)) };
}
