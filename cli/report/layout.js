"use strict";
// Where boxes are: each open module is laid out by itself, with its open children as boxes of their size; so opening one module lays
// out that module and those around it, however large the graph is.

const BOX = { width: 168, height: 44 };
const PADDING = { side: 14, top: 34, bottom: 14 };
const MOST_BOXES = 1500;

/** Lays out an item and what is open inside; gives its width and height, and places its children from its upper left corner. */
function layOut(item, isOpen) {
  if (item.parent && !(item.children.length && isOpen(item))) {
    item.inside = null;
    return { width: BOX.width, height: BOX.height };
  }
  const sizes = item.children.map((one) => layOut(one, isOpen));
  const key = sizes.map((one) => `${one.width}x${one.height}`).join();
  if (item.inside && item.inside.key === key) return item.inside;
  item.inside = arranged(item, sizes, key);
  return item.inside;
}

function arranged(item, sizes, key) {
  const drawn = new dagre.graphlib.Graph({ multigraph: false });
  drawn.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 34, marginx: 0, marginy: 0 });
  drawn.setDefaultEdgeLabel(() => ({}));
  item.children.forEach((one, k) => drawn.setNode(one.id, { ...sizes[k] }));
  for (const edge of item.edges ? item.edges.values() : []) {
    if (edge.from !== edge.to) drawn.setEdge(edge.from.id, edge.to.id, { edge, weight: edge.rows.size ? 1 : 2 });
  }
  if (drawn.edgeCount()) dagre.layout(drawn);
  else inRows(item, drawn);
  const size = drawn.graph();
  const places = new Map(item.children.map((one, k) => {
    const { x, y } = drawn.node(one.id);
    return [one, { x: x - sizes[k].width / 2 + PADDING.side, y: y - sizes[k].height / 2 + PADDING.top, ...sizes[k] }];
  }));
  const lines = drawn.edges().map((one) => {
    const { edge, points } = drawn.edge(one);
    return { edge, points: points.map(({ x, y }) => ({ x: x + PADDING.side, y: y + PADDING.top })) };
  });
  return { key, places, lines, width: size.width + 2 * PADDING.side, height: size.height + PADDING.top + PADDING.bottom };
}

/** Boxes without edges between them, in rows. */
function inRows(item, drawn) {
  const across = Math.ceil(Math.sqrt(item.children.length));
  let [x, y, high, width] = [0, 0, 0, 0];
  item.children.forEach((one, k) => {
    const box = drawn.node(one.id);
    if (k && k % across === 0) [x, y, high] = [0, y + high + 18, 0];
    Object.assign(box, { x: x + box.width / 2, y: y + box.height / 2 });
    x += box.width + 18;
    high = Math.max(high, box.height);
    width = Math.max(width, x - 18);
  });
  Object.assign(drawn.graph(), { width, height: y + high });
}

/** How many boxes are shown where these are open. */
function boxes(item, isOpen) {
  if (item.parent && !(item.children.length && isOpen(item))) return 1;
  return item.children.reduce((sum, one) => sum + boxes(one, isOpen), 1);
}
