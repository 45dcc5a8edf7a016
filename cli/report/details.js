"use strict";
// What is known of the module, node, message or collective that is chosen: where it runs and why, its layouts, and links onward.

const LISTED = 40;

function detailsOf(report, chosen) {
  if (chosen === null) {
    return element("div", {}, element("p", { class: "hint" }, "Choose a module, an op or an edge. Enter opens and closes a module; / searches."),
      moduleDetails(report, report.picture.tree.root));
  }
  if (chosen.ends) return rowDetails(report, chosen);
  return chosen.nodes ? nodeDetails(report, chosen) : moduleDetails(report, chosen);
}

function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return element("dl", {}, ...shown.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function ranksText(report, classes) {
  return [...classes].sort((a, b) => a - b).map((k) => report.data.graph.classes[k].ranks).join(", ");
}

function moduleDetails(report, item) {
  const ops = new Map();
  const rows = new Set();
  const count = (one) => {
    for (const node of one.nodes ? [one.nodes[0]] : []) ops.set(node.op, (ops.get(node.op) || 0) + 1);
    for (const edge of [...(one.in || []), ...(one.out || [])]) edge.rows.forEach((at) => rows.add(at));
    for (const node of one.nodes || []) if (node.row >= 0) rows.add(node.row);
    one.children.forEach(count);
  };
  count(item);
  const weights = [...item.weights].sort((a, b) => b[1] - a[1]);
  const bytes = weights.reduce((sum, [, size]) => sum + size, 0);
  return element("div", {},
    element("h3", {}, item.path || item.name || "the whole program"),
    facts([
      ["ranks", ranksText(report, item.classes)],
      ["nodes", item.count.toLocaleString("en")],
      ["weights", weights.length ? `${bytesText(bytes)}, a rank's shards of ${weights.length}` : ""],
      ["ops", [...ops].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([op, number]) => `${op} ${number}`).join(", ")],
    ]),
    rowsList(report, rows, "messages and collectives"),
    weights.length ? element("details", {}, element("summary", {}, "weights"),
      element("ul", { class: "plain" }, ...weights.slice(0, LISTED).map(([name, size]) => element("li", {}, `${name} `, element("b", {}, bytesText(size)))))) : null);
}

function nodeDetails(report, item) {
  const node = item.nodes[0];
  const forms = new Map();  // what differs by class of ranks, such as local shapes
  for (const one of item.nodes) {
    const key = JSON.stringify([one.why, one.cut, one.target, one.inputs.map((value) => value.type), one.outputs.map((value) => value.type)]);
    if (!forms.has(key)) forms.set(key, []);
    forms.get(key).push(one);
  }
  const row = node.row >= 0 ? report.data.communication[node.row] : null;
  return element("div", {},
    element("h3", {}, item.path || item.name),
    facts([["op", node.op], ["ranks", ranksText(report, item.classes)], ["phase", node.phase], ["task", node.task && `${node.task}, once for each microbatch`]]),
    ...(report.changesOf.get(item.path) || []).map((change) => element("p", { class: "changes" },
      `${change.kind}: ${change.before || "none"} became ${change.after || "none"}${change.why ? ` (${change.why})` : ""}`)),
    ...[...forms.values()].slice(0, 6).map((some) => element("div", { class: forms.size > 1 ? "form" : "" },
      forms.size > 1 ? element("h4", {}, `on ${ranksText(report, new Set(some.map((one) => one.of)))}`) : null,
      facts([
        [row ? "cause" : "why", some[0].why], ["sharded", some[0].cut], ["target", some[0].target], ["bytes", some[0].bytes],
      ]),
      values(report, "reads", some[0].inputs, false),
      values(report, "makes", some[0].outputs, true))),
    row ? element("p", {}, link("this collective's row", () => report.chooseRow(row))) : null);
}

function values(report, title, some, made) {
  if (!some.length) return null;
  const shown = some.slice(0, LISTED).map((value) => {
    const { maker, row } = origin(value, report.graph);
    const others = made ? readersOf(report, value) : maker ? [maker] : [];
    return element("li", {}, element("code", {}, value.name), " ", element("span", { class: "type" }, value.type),
      value.bytes ? ` weight, ${bytesText(value.bytes)}` : "",
      row >= 0 && !made ? [" ", link("received", () => report.chooseRow(report.data.communication[row]))] : null,
      others.length ? element("span", { class: "ways" }, made ? " to " : " from ", ...nodeLinks(report, others)) : null);
  });
  return element("div", {}, element("h4", {}, title), element("ul", { class: "plain" }, ...shown,
    some.length > LISTED ? element("li", {}, `and ${some.length - LISTED} more`) : null));
}

/** The nodes that read a value, on other ranks too: in place of a Send those behind its Recv. */
function readersOf(report, value) {
  const found = [];
  for (const node of value.readers) {
    if (node.op !== "Send") found.push(node);
    else found.push(...report.receivers(node).flatMap((one) => (one.delivered ? [one] : one.outputs[0].readers)));
  }
  return found;
}

function nodeLinks(report, nodes) {
  const byPath = new Map();
  for (const node of nodes) {
    const key = `${node.op} ${node.path}`;
    if (!byPath.has(key)) byPath.set(key, node);
  }
  const some = [...byPath.values()];
  const times = (path) => some.filter((node) => node.path === path).length;
  const title = (node) => (!node.path ? node.op : times(node.path) > 1 ? `${node.path} (${node.op}, ${node.phase})` : node.path);
  return some.slice(0, 6).flatMap((node, k) => [k ? ", " : "", link(title(node), () => report.showNode(node), node.op)])
    .concat(some.length > 6 ? [` and ${some.length - 6} more`] : []);
}

function rowDetails(report, row) {
  const ends = row.ends.slice(0, LISTED);
  const { makers, readers } = report.endsOf(row);
  return element("div", {},
    element("h3", {}, `${row.op} of ${row.value}`),
    facts([
      ["type", row.type], ["bytes", row.bytes], ["at these sizes", bytesText(row.at)],
      ["times a step", row.times > 1 ? `${row.times}${row.at ? `, together ${bytesText(row.at * row.times)}` : ""}` : ""],
      ["cause", row.cause],
      ["along", row.axes || ""],
      ["lists of ranks", row.lists ? row.lists.slice(0, LISTED).join(" | ") : ""],
      ["layout before", row.before || ""], ["layout after", row.after || ""],
      ["from, to", row.op === "Send" ? ends.map(([from, to]) => `${from} → ${to}`).filter((one, k, all) => all.indexOf(one) === k).join(", ") : ""],
    ]),
    makers.length ? element("div", {}, element("h4", {}, "made by"), element("p", { class: "ways" }, ...nodeLinks(report, makers))) : null,
    readers.length ? element("div", {}, element("h4", {}, "read by"), element("p", { class: "ways" }, ...nodeLinks(report, readers))) : null);
}

function rowsList(report, numbers, title) {
  const rows = [...numbers].map((at) => report.data.communication[at]).filter(Boolean)
    .sort((a, b) => (b.at || 0) * b.times - (a.at || 0) * a.times);
  if (!rows.length) return null;
  return element("div", {}, element("h4", {}, title), element("ul", { class: "plain" }, ...rows.slice(0, 12).map((row) =>
    element("li", {}, link(`${row.op} ${row.value}`, () => report.chooseRow(row)), ` ${bytesText(row.at)}`, row.times > 1 ? ` × ${row.times}` : "")),
  rows.length > 12 ? element("li", {}, `and ${rows.length - 12} more`) : null));
}
