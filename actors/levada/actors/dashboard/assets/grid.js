// A table of any length: only the rows in sight exist, here and in what the program sends.

import { $, h, say } from "./dom.js";

const ROW = 28;
const OVER = 15; // rows above and below that are asked for too
const MOST = 200;
const TALLEST = 8e6; // pixels; browsers lay out no more than 17 to 33 million

export class Grid {
  // `on` has view(), choose(row), fold(row, open), close(), sort(column).
  constructor(on) {
    this.on = on;
    this.element = $("grid");
    this.head = $("head");
    this.spacer = $("spacer");
    this.window = $("window");
    this.columns = [];
    this.rows = [];
    this.first = 0;
    this.total = 0;
    this.at = 0;
    this.lines = [];
    this.element.addEventListener("scroll", () => this.moved());
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.window.addEventListener("click", (event) => this.clicked(event));
    new ResizeObserver(() => this.moved()).observe(this.element);
  }

  setColumns(label, columns, tree) {
    this.columns = columns;
    this.tree = tree;
    this.element.setAttribute("aria-label", label);
    this.element.style.setProperty("--columns", columns.map((column) => column.width).join(" "));
    this.element.style.setProperty("--least", `${columns.reduce((sum, column) => sum + column.least, 0)}px`);
    this.head.replaceChildren(...columns.map((column) => h("span", { role: "columnheader", class: column.number ? "number" : "", title: column.title },
      column.label ? h("button", { type: "button", class: "sort", onclick: () => this.on.sort(column) }, column.label) : h("span", { class: "unseen" }, "more"))));
    this.window.replaceChildren();
    this.lines = [];
    this.rows = [];
    this.total = this.at = this.first = 0;
    this.element.scrollTop = 0;
  }

  // Mark the column that rows are sorted by: `order` is {label, descending}, or null.
  mark(order) {
    this.columns.forEach((column, at) => {
      const sorted = order?.label === column.label;
      const head = this.head.children[at];
      if (sorted) head.setAttribute("aria-sort", order.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }

  get height() {
    return Math.max(ROW, this.element.clientHeight - 29);
  }

  // The row at the top, with a fraction.
  get top() {
    const whole = this.total * ROW;
    if (whole <= TALLEST) return Math.min(this.element.scrollTop / ROW, Math.max(0, this.total - this.height / ROW));
    return (this.element.scrollTop / (TALLEST - this.height)) * (this.total - this.height / ROW);
  }

  wanted() {
    const visible = Math.ceil(this.height / ROW) + 1;
    const first = Math.max(0, Math.floor(this.top) - OVER);
    return { first, count: Math.min(MOST, visible + 2 * OVER) };
  }

  update({ rows, first, total }, { open, selected }) {
    this.rows = rows;
    this.first = first;
    this.total = total;
    this.open = open;
    this.selected = selected;
    this.at = Math.max(0, Math.min(this.at, total - 1));
    this.spacer.style.height = `${Math.min(total * ROW, TALLEST)}px`;
    this.element.setAttribute("aria-rowcount", total + 1);
    this.draw();
  }

  moved() {
    this.draw();
    this.on.view();
  }

  draw() {
    const top = this.top;
    const begin = Math.floor(top);
    const visible = Math.min(Math.ceil(this.height / ROW) + 1, this.total - begin);
    while (this.lines.length < visible) {
      const cells = this.columns.map((column, at) => this.cell(column, at));
      const line = h("div", { class: "row", role: "row" }, ...cells.map((cell) => cell.element));
      line.style.position = "absolute";
      line.style.left = line.style.right = "0";
      this.lines.push({ line, cells });
      this.window.append(line);
    }
    while (this.lines.length > Math.max(0, visible)) this.lines.pop().line.remove();
    let active = null;
    this.lines.forEach(({ line, cells }, slot) => {
      const index = begin + slot;
      const row = this.rows[index - this.first];
      line.style.top = `${(index - top) * ROW}px`;
      line.id = `row-${index}`;
      line.dataset.index = index;
      line.setAttribute("aria-rowindex", index + 2);
      line.classList.toggle("at", index === this.at);
      if (index === this.at) active = line.id;
      const chosen = Boolean(row && this.selected && row.path === this.selected);
      line.classList.toggle("chosen", chosen);
      line.setAttribute("aria-selected", chosen);
      if (this.tree && row) {
        line.setAttribute("aria-level", row.level + 1);
        const open = this.open.has(row.path);
        if (row.hidden) line.setAttribute("aria-expanded", open);
        else line.removeAttribute("aria-expanded");
      }
      this.columns.forEach((column, at) => cells[at].show(row));
    });
    if (active) this.element.setAttribute("aria-activedescendant", active);
    else this.element.removeAttribute("aria-activedescendant");
  }

  cell(column, at) {
    const text = h("span", {});
    const fold = at === 0 && this.tree ? h("button", { class: "fold", type: "button", tabindex: -1 }) : null;
    const element = h("span", { role: at ? "gridcell" : "rowheader" }, fold, text);
    const show = (row) => {
      let name = `${column.number ? "number " : ""}${column.style ?? ""}`;
      if (row && column.state) name += ` ${column.state(row)}`;
      if (fold) {
        name += row ? ` inset-${Math.min(8, row.level)}` : "";
        fold.style.visibility = row && row.hidden ? "" : "hidden";
        const open = Boolean(row && this.open.has(row.path));
        say(fold, open ? "▾" : "▸");
        if (row) fold.setAttribute("aria-label", `${open ? "Fold" : "Unfold"} ${row.path}`);
      }
      if (element.className !== name) element.className = name;
      const value = row ? column.text(row) : at === 0 ? "…" : "";
      say(text, value);
      const title = row && column.hint ? column.hint(row) : value.length > 12 ? value : "";
      if (element.title !== title) element.title = title;
    };
    return { element, show };
  }

  clicked(event) {
    const line = event.target.closest(".row");
    if (!line) return;
    this.at = Number(line.dataset.index);
    const row = this.rows[this.at - this.first];
    if (row && event.target.classList.contains("fold")) this.on.fold(row, !this.open.has(row.path));
    else if (row) this.on.choose(row);
    this.draw();
  }

  go(index) {
    this.at = Math.max(0, Math.min(this.total - 1, index));
    const last = this.top + this.height / ROW - 1;
    const scaled = this.total * ROW > TALLEST;
    const place = (row) => (scaled ? (row / (this.total - this.height / ROW)) * (TALLEST - this.height) : row * ROW);
    if (this.at < this.top) this.element.scrollTop = place(this.at);
    else if (this.at > last) this.element.scrollTop = place(this.at - this.height / ROW + 1);
    this.moved();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const row = this.rows[this.at - this.first];
    const page = Math.max(1, Math.floor(this.height / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves) this.go(this.at + moves[event.key]);
    else if (event.key === "Enter" && row) this.on.choose(row);
    else if (event.key === "Escape") this.on.close();
    else if (event.key === "ArrowRight" && row && this.tree) {
      if (row.hidden && !this.open.has(row.path)) this.on.fold(row, true);
      else if (row.hidden) this.go(this.at + 1);
    } else if (event.key === "ArrowLeft" && row && this.tree) {
      if (row.hidden && this.open.has(row.path)) this.on.fold(row, false);
      else {
        const parent = row.path.slice(0, row.path.lastIndexOf("/"));
        const found = this.rows.findIndex((each) => each.path === parent);
        if (found >= 0) this.go(this.first + found);
      }
    } else return;
    event.preventDefault();
  }
}
