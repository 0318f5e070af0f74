// A list of which only the rows in view are in the page: 20,000 rows cost what 40 do.

const ROW = 24;

class Rows {
  /** `make(row, k)` returns the element of a row; `choose(row)` is called for a click and for Enter. */
  constructor(box, make, choose) {
    Object.assign(this, { box, make, choose, rows: [], current: -1 });
    this.space = element("div.space");
    box.replaceChildren(this.space);
    box.addEventListener("scroll", () => this.paint());
    box.addEventListener("click", (event) => this.click(event));
    box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.paint()).observe(box);
  }

  show(rows) {
    this.rows = rows;
    this.current = Math.min(this.current, rows.length - 1);
    this.space.replaceChildren(); // the old ones would keep the list as long as it was, and its scroll position
    this.space.style.height = `${rows.length * ROW}px`;
    this.paint();
  }

  paint() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 4);
    const last = Math.min(this.rows.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + 4);
    const made = [];
    for (let k = first; k < last; k++) {
      const row = this.make(this.rows[k], k);
      row.style.top = `${k * ROW}px`;
      row.dataset.row = k;
      row.id = `${this.box.id}-${k}`;
      if (k === this.current) row.classList.add("current");
      made.push(row);
    }
    this.space.replaceChildren(...made);
  }

  click(event) {
    const row = event.target.closest("[data-row]");
    if (row) this.go(Number(row.dataset.row), true);
  }

  /** Make a row the current one, in view. */
  go(k, chosen) {
    if (!this.rows.length) return;
    this.current = Math.max(0, Math.min(this.rows.length - 1, k));
    const top = this.current * ROW, view = this.box.scrollTop;
    if (top < view || top + ROW > view + this.box.clientHeight) this.box.scrollTop = top - this.box.clientHeight / 2;
    this.box.setAttribute("aria-activedescendant", `${this.box.id}-${this.current}`);
    if (chosen) this.choose(this.rows[this.current], "toggle");
    this.paint();
  }

  key(event) {
    const page = Math.floor(this.box.clientHeight / ROW) - 1;
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const row = this.rows[this.current];
    if (event.key in steps) this.go(Math.max(0, this.current) + steps[event.key], false);
    else if (row && (event.key === "Enter" || event.key === " ")) this.choose(row, "toggle");
    else if (row && event.key === "ArrowRight") this.choose(row, "open");
    else if (row && event.key === "ArrowLeft") this.choose(row, "close");
    else return;
    event.preventDefault();
  }
}
