"use strict";
// The picture of the graph: boxes that open and close, drawn as SVG; it moves by dragging, the wheel and the keys.

const READABLE = 0.72;
const LEGIBLE = 0.3;  // below it texts have less than 4 pixels, and would cost more than all else

/** The graph view. `onchoose` is called with what is chosen: an item of the tree, or null. */
class Picture {
  constructor(place, report, onchoose) {
    Object.assign(this, { place, report, onchoose });
    this.open = new Set();
    this.chosen = null;
    this.mode = "modules";
    this.phase = report.graph.nodes.some((node) => node.phase === "backward") ? "forward" : "";
    this.canvas = shape("svg", { class: "canvas", tabindex: "0", role: "group", "aria-label": "Graph of modules; arrow keys move it, + and - zoom, 0 fits" });
    this.world = shape("g");
    this.canvas.append(
      shape("defs", {}, ...["edge", "message", "lit"].map((name) => shape("marker",
        { id: `end-${name}`, viewBox: "0 0 8 8", refX: "7", refY: "4", markerWidth: "6", markerHeight: "6", orient: "auto" },
        shape("path", { d: "M0 0L8 4L0 8z", class: `tip ${name}` })))),
      this.world);
    this.note = element("div", { class: "note", role: "status" });
    this.legend = element("div", { class: "legend" });
    place.append(element("div", { class: "canvas-around" }, this.canvas, this.legend, this.note));
    this.view = { x: 0, y: 0, scale: 1 };
    this.listen();
    this.build();
  }

  /** Makes the tree anew, after the mode or the phase has changed; what was open stays open. */
  build() {
    this.tree = buildTree(this.report.graph, this.report.data.graph.classes, this.mode, this.phase);
    this.chosen = null;
    if (!this.open.size) this.openFirst();
    this.draw();
    this.fit(READABLE);
    if (this.report.picture === this) this.onchoose(null);
  }

  /** Opens modules from the outside as long as few boxes are shown. */
  openFirst() {
    let some = this.tree.root.children.slice();
    let shown = some.length;
    while (some.length) {
      const next = some.filter((one) => one.children.length).sort((a, b) => a.children.length - b.children.length);
      const inside = [];
      for (const one of next) {
        if (shown + one.children.length > 24) continue;
        shown += one.children.length;
        this.open.add(one.id);
        inside.push(...one.children);
      }
      some = inside;
    }
  }

  drawLegend() {
    const { classes } = this.report.data.graph;
    const shown = classes.slice(0, 12).map((one, k) => element("span", { class: "key" },
      element("i", { style: `background:${hue(k)}` }), one.size > 1 ? `ranks ${one.ranks}` : `rank ${one.ranks}`));
    if (classes.length > 12) shown.push(element("span", { class: "key" }, `and ${classes.length - 12} more`));
    shown.push(element("span", { class: "key" }, element("i", { class: "message" }), "message between ranks"));
    if (this.report.difference) shown.push(element("span", { class: "key" }, element("i", { class: "changed" }), "changed"));
    this.legend.replaceChildren(...shown);
  }

  draw() {
    const isOpen = (item) => this.open.has(item.id);
    this.size = layOut(this.tree.root, isOpen);
    this.drawLegend();
    this.at = new Map();
    this.elements = new Map();
    const [boxesOf, linesOf] = [[], []];
    this.drawInside(this.tree.root, 0, 0, boxesOf, linesOf);
    this.lit = shape("g", { class: "lit" });
    this.world.replaceChildren(...boxesOf, ...linesOf, this.lit);
    this.mark();
    this.move();
  }

  drawInside(item, x, y, boxesOf, linesOf) {
    for (const [child, place] of item.inside.places) {
      const [left, top] = [x + place.x, y + place.y];
      this.at.set(child, { x: left, y: top, width: place.width, height: place.height });
      boxesOf.push(this.box(child, left, top, place));
      if (child.inside && this.open.has(child.id)) this.drawInside(child, left, top, boxesOf, linesOf);
    }
    for (const { edge, points } of item.inside.lines) linesOf.push(this.line(edge, points, x, y));
  }

  box(item, x, y, { width, height }) {
    const opens = item.children.length > 0;
    const isOpen = opens && this.open.has(item.id);
    const kind = item.nodes ? (item.nodes[0].delivered ? "node output" : item.nodes[0].tag >= 0 ? "collective" : "node") : isOpen ? "module open" : "module";
    const changed = this.report.changed && this.report.changed(item);
    const texts = item.nodes ? [item.name, item.nodes[0].op === item.name ? "" : item.nodes[0].op]
      : [item.name, isOpen ? "" : this.about(item)];
    const made = shape("g", {
      class: `box ${kind}${changed ? " changed" : ""}`, transform: `translate(${x} ${y})`, tabindex: "0", role: "button",
      "aria-expanded": opens ? String(isOpen) : null, "data-path": item.path, "data-name": item.name,
      "aria-label": `${item.nodes ? item.nodes[0].op : "module"} ${item.path || item.name}`,
    },
    shape("title", {}, item.path || item.name),
    shape("rect", { width, height, rx: 6 }),
    ...this.stripes(item, height));
    const fits = Math.floor((width - (opens ? 46 : 30)) / 7.3);
    made.append(shape("text", { x: 14, y: texts[1] ? 19 : isOpen ? 21 : 27, class: "title" }, shortened(texts[0], fits)));
    if (texts[1]) made.append(shape("text", { x: 14, y: 35, class: "about" }, shortened(texts[1], fits + 4)));
    if (opens) made.append(shape("text", { x: width - 16, y: 20, class: "sign" }, isOpen ? "−" : "+"));
    made.addEventListener("click", (event) => { event.stopPropagation(); if (!this.dragged) this.choose(item, true); });
    made.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        event.stopPropagation();
        this.choose(item, true);
      }
    });
    this.elements.set(item, made);
    return made;
  }

  /** A stripe at the left for each class of ranks that runs it. */
  stripes(item, height) {
    const some = [...item.classes].sort((a, b) => a - b);
    if (item.nodes && item.nodes[0].tag >= 0 && !some.length) return [];
    const each = (height - 8) / some.length;
    return some.map((k, at) => shape("rect", { x: 4, y: 4 + at * each, width: 4, height: Math.max(0.5, each - (each > 4 ? 1 : 0)), fill: hue(k), class: "stripe" }));
  }

  about(item) {
    const weights = [...item.weights.values()].reduce((sum, one) => sum + one, 0);
    return countText(item.count, "node") + (weights ? `, ${bytesText(weights)}` : "");
  }

  line(edge, points, x, y) {
    const message = edge.rows.size > 0;
    const rows = [...edge.rows].map((at) => this.report.data.communication[at]);
    const bytes = rows.reduce((sum, row) => sum + (row.at || 0) * row.times, 0);
    const moved = points.map((one) => ({ x: one.x + x, y: one.y + y }));
    const made = shape("g", { class: message ? "edge message" : "edge" },
      shape("path", { d: curve(moved), "marker-end": `url(#end-${message ? "message" : "edge"})` }),
      shape("title", {}, message ? `${countText(rows.length, "message")}, ${bytesText(bytes)} a step` : [...edge.values].slice(0, 8).join("\n")));
    if (message) {
      const middle = moved[Math.floor(moved.length / 2)];
      made.append(shape("text", { x: middle.x + 5, y: middle.y + 4, class: "bytes" }, bytesText(bytes)));
      made.addEventListener("click", (event) => { event.stopPropagation(); this.report.chooseRow(rows[0]); });
    }
    return made;
  }

  /** Chooses an item; a module opens or closes where `toggles`. */
  choose(item, toggles = false) {
    this.chosen = item;
    if (toggles && item && item.children.length) this.toggle(item);
    this.mark();
    this.onchoose(item);
  }

  toggle(item) {
    const before = this.at.get(item);
    if (this.open.has(item.id)) this.open.delete(item.id);
    else this.open.add(item.id);
    this.draw();
    const after = this.at.get(item);
    if (before && after) {
      this.view.x += (before.x - after.x) * this.view.scale;
      this.view.y += (before.y - after.y) * this.view.scale;
      this.move();
    }
    const made = this.elements.get(item);
    if (made) made.focus({ preventScroll: true });
  }

  /** Opens all modules inside, or closes all. */
  openAll(open) {
    this.note.textContent = "";
    if (!open) this.open.clear();
    else {
      const before = new Set(this.open);
      for (const item of this.tree.items.values()) if (item.children.length) this.open.add(item.id);
      const number = boxes(this.tree.root, (item) => this.open.has(item.id));
      if (number > MOST_BOXES) {
        this.open = before;
        this.note.textContent = `${number.toLocaleString("en")} boxes are too many for one picture: open modules one by one, or search`;
        return;
      }
    }
    this.draw();
    this.fit();
  }

  /** Shows an item: opens the modules around it and moves there. */
  reveal(item) {
    for (let at = item.parent; at && at.parent; at = at.parent) this.open.add(at.id);
    this.draw();
    const at = this.at.get(item);
    if (at) {
      const { width, height } = this.canvas.getBoundingClientRect();
      this.view.scale = Math.min(1.1, Math.max(0.75, this.view.scale));
      this.view.x = width / 2 - (at.x + Math.min(at.width, width) / 2) * this.view.scale;
      this.view.y = height / 2 - (at.y + Math.min(at.height, height / 2) / 2) * this.view.scale;
      this.move();
    }
    this.choose(item);
  }

  /** The leaf of a node; where its phase is not shown, all phases are. */
  leaf(node) {
    if (!this.tree.leafOf.has(node.id) && this.phase) {
      this.report.setPhase(node.phase);
    }
    return this.tree.leafOf.get(node.id);
  }

  /** Marks what is chosen, with lines from what it reads and to what reads it. */
  mark() {
    for (const [item, made] of this.elements) made.classList.toggle("chosen", item === this.chosen);
    this.lit.replaceChildren();
    const item = this.chosen;
    if (!item || !item.nodes || !this.at.has(item)) return;
    for (const [edges, key] of [[item.in || [], "source"], [item.out || [], "target"]]) {
      for (const edge of edges.slice(0, 40)) {
        const [from, to] = [this.shown(edge.source), this.shown(edge.target)];
        if (from && to && from !== to && this.at.has(from) && this.at.has(to)) this.lit.append(this.litLine(this.at.get(from), this.at.get(to), edge));
        const other = this.elements.get(this.shown(edge[key]));
        if (other && edge.rows.size) other.classList.add("near");
      }
    }
  }

  litLine(a, b, edge) {
    const from = { x: a.x + a.width / 2, y: a.y + a.height };
    const to = { x: b.x + b.width / 2, y: b.y };
    const bend = Math.max(24, Math.abs(to.y - from.y) / 2);
    return shape("path", { class: edge.rows.size ? "message" : "", "marker-end": "url(#end-lit)",
      d: `M${from.x} ${from.y}C${from.x} ${from.y + bend} ${to.x} ${to.y - bend} ${to.x} ${to.y}` });
  }

  /** The innermost shown box around a leaf. */
  shown(item) {
    let found = item;
    for (let at = item; at && at.parent; at = at.parent) {
      if (!this.at.has(at)) found = at.parent;
    }
    return found;
  }

  /** Shows all of it, in the middle; no smaller than `least`, below which its upper part is shown. */
  fit(least = 0.05) {
    const { width, height } = this.canvas.getBoundingClientRect();
    if (!width) return;
    const scale = Math.max(least, Math.min(1.15, (width - 24) / this.size.width, (height - 24) / this.size.height));
    this.view = { scale, x: (width - this.size.width * scale) / 2, y: Math.max(12, (height - this.size.height * scale) / 2) };
    this.move();
  }

  /** Puts the picture where `view` says. Boxes out of sight have no texts, whose layout would be most of the time of a zoom. */
  move() {
    const { x, y, scale } = this.view;
    const { width, height } = this.canvas.getBoundingClientRect();
    for (const [item, made] of this.elements) {
      const at = this.at.get(item);
      const isAway = x + (at.x + at.width) * scale < 0 || x + at.x * scale > width || y + (at.y + at.height) * scale < 0 || y + at.y * scale > height;
      made.classList.toggle("away", isAway);
    }
    this.world.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
    this.canvas.classList.toggle("far", scale < LEGIBLE);
  }

  /** Moves the picture so that a box which the keys have reached is in sight. */
  bringIntoSight(made) {
    if (made === this.canvas) return;
    const [box, around] = [made.getBoundingClientRect(), this.canvas.getBoundingClientRect()];
    const [width, height] = [Math.min(box.width, BOX.width), Math.min(box.height, BOX.height)];
    const isSeen = box.left >= around.left && box.top >= around.top && box.left + width <= around.right && box.top + height <= around.bottom;
    if (isSeen) return;
    this.view.x += around.left + around.width / 2 - (box.left + width / 2);
    this.view.y += around.top + around.height / 3 - box.top;
    this.move();
    requestAnimationFrame(() => this.canvas.scrollIntoView({ block: "nearest" }));
  }

  zoom(factor, x, y) {
    const scale = Math.min(3, Math.max(0.05, this.view.scale * factor));
    const by = scale / this.view.scale;
    this.view = { scale, x: x - (x - this.view.x) * by, y: y - (y - this.view.y) * by };
    this.move();
  }

  zoomAtMiddle(factor) {
    const { width, height } = this.canvas.getBoundingClientRect();
    this.zoom(factor, width / 2, height / 2);
  }

  listen() {
    const { canvas } = this;
    let from = null;
    canvas.addEventListener("pointerdown", (event) => {
      this.dragged = false;
      from = { x: event.clientX, y: event.clientY, view: { ...this.view } };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!from) return;
      const [x, y] = [event.clientX - from.x, event.clientY - from.y];
      if (!this.dragged && Math.abs(x) + Math.abs(y) > 4) {
        this.dragged = true;
        canvas.setPointerCapture(event.pointerId);
      }
      if (this.dragged) {
        this.view = { ...from.view, x: from.view.x + x, y: from.view.y + y };
        this.move();
      }
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { from = null; });
    canvas.addEventListener("pointerleave", () => { if (!this.dragged) from = null; });
    canvas.addEventListener("focusin", (event) => { if (!from) this.bringIntoSight(event.target); });  // what the pointer presses stays under it
    canvas.addEventListener("click", () => { if (!this.dragged) this.choose(null); });
    canvas.addEventListener("wheel", (event) => {
      if (!(event.ctrlKey || event.metaKey || canvas.contains(document.activeElement))) {
        this.note.textContent = "Click into the picture, or hold Ctrl, to zoom by the wheel";
        return;
      }
      event.preventDefault();
      this.note.textContent = "";
      const { left, top } = canvas.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY * 0.0016), event.clientX - left, event.clientY - top);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
      if (moves[event.key]) {
        this.view.x += moves[event.key][0];
        this.view.y += moves[event.key][1];
        this.move();
      } else if (event.key === "+" || event.key === "=") this.zoomAtMiddle(1.25);
      else if (event.key === "-") this.zoomAtMiddle(0.8);
      else if (event.key === "0") this.fit();
      else if (event.key === "Escape") this.choose(null);
      else return;
      event.preventDefault();
    });
    new ResizeObserver(() => this.move()).observe(canvas);
    whenRecoloured(canvas, () => this.draw());
  }
}

function shortened(text, most) {
  return text.length <= most ? text : `${text.slice(0, Math.max(1, most - 1))}…`;
}

/** A smooth path through points. */
function curve(points) {
  const [first, ...rest] = points;
  let path = `M${first.x} ${first.y}`;
  for (let k = 0; k < rest.length; k += 1) {
    const [here, next] = [rest[k], rest[k + 1]];
    path += next ? `Q${here.x} ${here.y} ${(here.x + next.x) / 2} ${(here.y + next.y) / 2}` : `L${here.x} ${here.y}`;
  }
  return path;
}
