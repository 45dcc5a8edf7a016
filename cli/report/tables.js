"use strict";
// Tables that can be sorted and filtered; of many rows only those in sight are elements.

const ROW_HEIGHT = 28;
const FEW_ROWS = 60;

/**
 * A table of `rows`. A column is {title, text: row => shown, sort: row => number or text, right, wide, cell: row => element}.
 * A table of few rows has whole texts where it `wraps`. `onrow` is called with a row that is clicked or chosen by Enter. The element has `show(rows)` to replace them.
 */
function table(columns, rows, { onrow = null, height = 420, label = "", sorted = null, wraps = false } = {}) {
  let order = sorted;
  let shown = rows;
  let filter = () => true;
  const head = element("div", { class: "row head", role: "row" });
  const inside = element("div", { class: "rows", role: "rowgroup" });
  const scroller = element("div", { class: "scroller", tabindex: "0", "aria-label": label, style: `max-height:${height}px` }, inside);
  const whole = element("div", { class: wraps ? "table wraps" : "table", role: "table", "aria-label": label, "aria-rowcount": rows.length }, head, scroller);
  const widths = columns.map((one) => one.width || (one.wide ? "minmax(12rem, 3fr)" : "minmax(4.5rem, 1fr)"));
  whole.style.setProperty("--columns", widths.join(" "));
  whole.style.setProperty("--least", `${widths.reduce((sum, one) => sum + parseFloat(one.replace("minmax(", "")) + 0.8, 1)}rem`);

  for (const column of columns) {
    const sort = () => {
      order = { column, down: order && order.column === column ? !order.down : !!column.right };
      draw();
    };
    head.append(element("div", { class: column.right ? "cell right" : "cell", role: "columnheader" },
      column.sort ? element("button", { type: "button", onclick: sort }, column.title, element("span", { class: "arrow" })) : column.title));
  }

  function rowElement(row) {
    const open = onrow && (() => onrow(row));
    const made = element("div", {
      class: open ? "row opens" : "row", role: "row", tabindex: open ? "0" : null, onclick: open || null || (() => {}),
      onkeydown: (event) => { if (open && event.target === made && event.key === "Enter") open(); },
    });
    for (const column of columns) {
      const text = column.text ? String(column.text(row) ?? "") : "";
      made.append(element("div", { class: column.right ? "cell right" : "cell", role: "cell", title: text || null },
        column.cell ? column.cell(row) : text));
    }
    return made;
  }

  function inSight() {
    if (shown.length <= FEW_ROWS) {
      inside.style.height = "";
      inside.replaceChildren(...shown.map(rowElement));
      return;
    }
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW_HEIGHT) - 5);
    const last = Math.min(shown.length, first + Math.ceil(height / ROW_HEIGHT) + 10);
    inside.style.height = `${shown.length * ROW_HEIGHT}px`;
    const above = element("div", { style: `height:${first * ROW_HEIGHT}px` });
    inside.replaceChildren(above, ...shown.slice(first, last).map(rowElement));
  }

  function draw() {
    shown = rows.filter(filter);
    if (order) {
      const key = order.column.sort;
      const sign = order.down ? -1 : 1;
      shown = shown.slice().sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        return sign * (typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
      });
    }
    [...head.children].forEach((cell, k) => {
      const arrow = cell.querySelector(".arrow");
      const isSorted = order && order.column === columns[k];
      if (arrow) arrow.textContent = isSorted ? (order.down ? " ▾" : " ▴") : "";
      cell.setAttribute("aria-sort", isSorted ? (order.down ? "descending" : "ascending") : "none");
    });
    inSight();
    return shown.length;
  }

  scroller.addEventListener("scroll", () => { if (shown.length > FEW_ROWS) inSight(); });
  if (sorted && typeof sorted === "number") order = { column: columns[sorted], down: true };
  whole.filter = (accepts) => { filter = accepts; return draw(); };
  draw();
  return whole;
}
