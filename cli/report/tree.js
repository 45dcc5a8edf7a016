"use strict";
// The graph as a tree: modules within modules down to nodes, from the nodes of all classes of ranks.
//
// "modules": a node that several classes run is one leaf. "ranks": each class has a tree of its own. A message is an edge between
// the node that makes its value and those that read it on another rank; a collective is a leaf, between what it takes and gives.
// A module of more children than MOST_CHILDREN shows them in blocks, by their order in the program.

const MOST_CHILDREN = 36;
const MOST_LEAVES = 2 ** 26;
const PHASES = ["forward", "backward", "update"];

/** Nodes as objects, with the values by name, and what makes and reads each. */
function readNodes(data) {
  const { columns, texts, classes } = data.graph;
  const rowOfTag = new Map();
  data.communication.forEach((row, at) => row.ends.forEach((end) => rowOfTag.set(end[end.length - 1], at)));
  const nodes = [];
  const sends = new Map();
  classes.forEach((one, k) => {
    const values = one.values.map(([name, type, bytes]) => ({ name: texts[name], type: texts[type], bytes, maker: null, readers: [] }));
    one.node = one.nodes.map((row, at) => {
      const node = { id: nodes.length, of: k, at };
      columns.forEach((column, c) => {
        node[column] = c < 8 ? texts[row[c]] : c === 8 ? row[c] : row[c].map((value) => values[value]);
      });
      node.message = node.op === "Send" || node.op === "Recv";
      node.row = node.tag >= 0 ? rowOfTag.get(node.tag) ?? -1 : -1;
      for (const value of node.inputs) value.readers.push(node);
      for (const value of node.outputs) value.maker = node;
      if (node.op === "Send") sends.set(node.tag, node);
      nodes.push(node);
      return node;
    });
    one.node.forEach(setDelivered);
    one.node.slice().reverse().forEach(setPhase);
  });
  return { nodes, sends, rowOfTag, rows: data.communication };
}

/** A Recv that no node reads is an output of the program, which is delivered to the rank, and a leaf of its own. */
function setDelivered(node) {
  if (node.op !== "Recv" || node.outputs[0].readers.length) return;
  Object.assign(node, { message: false, delivered: true, op: "output", path: node.outputs[0].name, phase: "forward" });
}

/** A collective is of the phase of what makes its operand; what is made of nothing, of the phase of all that read it. */
function setPhase(node) {
  if (node.phase) return;
  const makers = node.inputs.map((value) => value.maker).filter(Boolean);
  const phases = new Set(node.outputs.flatMap((value) => value.readers).map((one) => one.phase || "forward"));
  if (node.tag >= 0 && makers.length) node.phase = makers[0].phase || "forward";
  else node.phase = phases.size === 1 && !makers.length ? [...phases][0] : "forward";
}

/** The node that makes a value, where it was received the one on the rank that sent it; with the row of the message. */
function origin(value, graph) {
  const maker = value.maker;
  if (!maker || !(maker.message || maker.delivered)) return { maker, row: -1 };
  const row = graph.rows[maker.row];
  const end = row && row.ends.find(([, , tag]) => graph.sends.has(tag));
  const send = end && graph.sends.get(end[2]);
  return { maker: send ? send.inputs[0].maker : null, row: maker.row };
}

/** The tree of a graph, by "modules" or by "ranks", of one phase or of all (""). */
function buildTree(graph, classes, mode, phase) {
  const root = { name: "", path: "", id: "", parent: null, children: new Map(), depth: 0, order: 0 };
  const leafOf = new Map();
  let order = 0;

  function child(parent, name, path) {
    if (!parent.children.has(name)) {
      const id = `${parent.id}/${name}`;
      parent.children.set(name, { name, path, id, parent, children: new Map(), depth: parent.depth + 1, order: order++ });
    }
    return parent.children.get(name);
  }

  for (const node of graph.nodes) {
    if (node.message || (phase && node.phase !== phase)) continue;
    let at = root;
    if (mode === "ranks") {
      at = child(at, `${classes[node.of].size > 1 ? "ranks" : "rank"} ${classes[node.of].ranks}`, "");
      at.isClass = true;
    }
    const names = node.path.split(/[./]/);
    names.slice(0, -1).forEach((name, k) => { at = child(at, name, names.slice(0, k + 1).join(".")); });
    const made = node.row >= 0 ? `row ${node.row}` : node.outputs[0] ? node.outputs[0].name : `${node.op} ${node.at}`;
    const leaf = child(at, `\n${node.op} ${made}`, node.path);
    leaf.name = names[names.length - 1];
    leaf.nodes ||= [];
    leaf.nodes.push(node);
    leafOf.set(node.id, leaf);
  }
  collapse(root);
  const edges = leafEdges(graph, leafOf);
  untangle(root, edges);
  const items = new Map();
  settle(root, items);
  edges.forEach(joinInModule);
  return { root, items, leafOf };
}

/** A module of one node is that node, under the module's name. */
function collapse(item) {
  for (const [key, one] of item.children) {
    collapse(one);
    const [only, ...others] = one.children.values();
    if (!only || others.length || !only.nodes || one.isClass) continue;
    only.name = only.name === only.nodes[0].op ? one.name : `${one.name}.${only.name}`;
    only.parent = item;
    item.children.set(key, only);
  }
}

/**
 * Modules that are called in several places, such as one activation after every layer, read what is made of their own results. Such a
 * module is shown in parts, one for each connected part of it, so that the picture goes one way.
 */
function untangle(item, edges) {
  const between = [];
  const inside = new Map([...item.children.values()].map((one) => [one, []]));
  for (const edge of edges) {
    const [a, b] = [under(item, edge.source), under(item, edge.target)];
    if (a && b && a !== b) between.push([a, b]);
    else if (a && b) inside.get(a).push(edge);
  }
  const tangled = inCircles([...item.children.values()], between);
  for (const [key, one] of [...item.children]) {
    const own = inside.get(one);
    const some = tangled.has(one) && !one.nodes ? connected(one, own) : [one];
    if (some.length > 1) {
      item.children.delete(key);
      some.forEach((leaves, k) => item.children.set(`${key}\n${k}`, partOf(one, leaves, k, item)));
    } else if (!one.nodes) untangle(one, own);
  }
}

/** The child of an item around a leaf, or null. */
function under(item, leaf) {
  let at = leaf;
  while (at && at.parent !== item) at = at.parent;
  return at;
}

/** The items that lead back to themselves: those left when all without a way in, or without a way out, are taken away. */
function inCircles(items, between) {
  const left = new Set(items);
  for (const [from, to] of [[0, 1], [1, 0]]) {
    const counts = new Map(items.map((one) => [one, 0]));
    const ways = new Map(items.map((one) => [one, []]));
    for (const edge of between) {
      if (!left.has(edge[0]) || !left.has(edge[1])) continue;
      counts.set(edge[to], counts.get(edge[to]) + 1);
      ways.get(edge[from]).push(edge[to]);
    }
    const free = items.filter((one) => left.has(one) && !counts.get(one));
    while (free.length) {
      const one = free.pop();
      left.delete(one);
      for (const other of ways.get(one)) {
        counts.set(other, counts.get(other) - 1);
        if (!counts.get(other)) free.push(other);
      }
    }
  }
  return left;
}

/** The leaves of an item in connected parts, in the order of the program. */
function connected(item, edges) {
  const partner = new Map();
  const root = (leaf) => {
    let at = leaf;
    while (partner.get(at) !== at) at = partner.get(at);
    return at;
  };
  const add = (one) => { if (one.nodes) partner.set(one, one); else one.children.forEach(add); };
  add(item);
  for (const { source, target } of edges) partner.set(root(source), root(target));
  const parts = new Map();
  for (const leaf of partner.keys()) {
    const key = root(leaf);
    parts.set(key, [...(parts.get(key) || []), leaf]);
  }
  return [...parts.values()];
}

/** A copy of a module with some of its leaves alone; a single leaf is itself. */
function partOf(item, leaves, number, parent) {
  if (leaves.length === 1) {
    const [leaf] = leaves;
    leaf.name = leaf.name === leaf.nodes[0].op || leaf.nodes[0].op === leaf.name.replace(/_\d+$/, "") ? item.name : `${item.name}${item.isClass ? ": " : "."}${leaf.name}`;
    leaf.parent = parent;
    return leaf;
  }
  const kept = new Set(leaves);
  const copy = (one, above, id) => {
    if (one.nodes) {
      one.parent = above;
      return one;
    }
    const made = { ...one, id, parent: above, children: new Map() };
    for (const [key, inner] of one.children) {
      const innerCopy = inner.nodes && !kept.has(inner) ? null : copy(inner, made, `${id}/${key}`);
      if (innerCopy && (innerCopy.nodes || innerCopy.children.size)) made.children.set(key, innerCopy);
    }
    return made;
  };
  return copy(item, parent, `${item.id}\n${number}`);
}

/** Makes lists of children, with blocks where they are many; counts what is inside of each. */
function settle(item, items) {
  let children = [...item.children.values()];
  items.set(item.id, item);
  while (children.length === 1 && !item.isClass && item.parent && !children[0].nodes) {  // a module that holds one module alone
    const only = children[0];
    item.name = `${item.name}.${only.name}`;
    item.path = only.path;
    children = [...only.children.values()];
  }
  if (children.length > MOST_CHILDREN) children = inBlocks(item, children);
  item.children = children;
  item.count = item.nodes ? 1 : 0;
  item.classes = new Set(item.nodes ? item.nodes.map((node) => node.of) : []);
  item.weights = new Map();
  for (const node of item.nodes || []) {
    for (const value of node.inputs) if (value.bytes) item.weights.set(value.name, value.bytes);
  }
  for (const one of children) {
    one.parent = item;
    one.depth = item.depth + 1;
    settle(one, items);
    item.count += one.count;
    one.classes.forEach((k) => item.classes.add(k));
    one.weights.forEach((bytes, name) => item.weights.set(name, bytes));
  }
}

function inBlocks(item, children) {
  const size = Math.max(Math.ceil(children.length / MOST_CHILDREN), Math.min(24, Math.ceil(Math.sqrt(children.length))));
  const blocks = [];
  for (let at = 0; at < children.length; at += size) {
    const some = children.slice(at, at + size);
    const name = some.length > 1 ? `${some[0].name} … ${some[some.length - 1].name}` : some[0].name;
    const id = `${item.id}/\n${at}`;
    blocks.push(some.length === 1 ? some[0]
      : { name, path: item.path, id, block: true, parent: item, children: new Map(some.map((one, k) => [k, one])), depth: item.depth + 1 });
  }
  return blocks;
}

/** The edges between leaves, each once, with its values and the rows of its messages. */
function leafEdges(graph, leafOf) {
  const edges = new Map();
  for (const node of graph.nodes) {
    const reader = leafOf.get(node.id);
    if (!reader) continue;
    for (const value of node.delivered ? node.outputs : node.inputs) {
      const { maker, row } = origin(value, graph);
      const source = maker && leafOf.get(maker.id);
      if (!source || source === reader) continue;
      const key = source.order * MOST_LEAVES + reader.order;
      if (!edges.has(key)) {
        const edge = { source, target: reader, values: new Set(), rows: new Set() };
        edges.set(key, edge);
        (source.out ||= []).push(edge);
        (reader.in ||= []).push(edge);
      }
      const edge = edges.get(key);
      edge.values.add(value.name);
      if (row >= 0) edge.rows.add(row);
    }
  }
  return [...edges.values()];
}

/** Adds an edge between leaves to the one between the modules around them. */
function joinInModule(edge) {
  const [inside, from, to] = where(edge.source, edge.target);
  inside.edges ||= new Map();
  const key = `${from.id} ${to.id}`;
  if (!inside.edges.has(key)) inside.edges.set(key, { from, to, values: new Set(), rows: new Set() });
  const joined = inside.edges.get(key);
  edge.values.forEach((one) => joined.values.add(one));
  edge.rows.forEach((one) => joined.rows.add(one));
}

/** The innermost module around two leaves, and its children in which they are. */
function where(one, other) {
  let [a, b] = [one, other];
  while (a.depth > b.depth && a.parent !== b.parent) a = a.parent;
  while (b.depth > a.depth && a.parent !== b.parent) b = b.parent;
  while (a.parent !== b.parent) [a, b] = [a.parent, b.parent];
  return [a.parent, a, b];
}
