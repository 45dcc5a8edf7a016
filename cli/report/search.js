"use strict";
// The search: modules, nodes and values whose path has the text, modules first; arrow keys and Enter choose.

const FOUND = 40;

function listenForSearch(getReport) {
  const input = document.getElementById("search");
  const list = document.getElementById("found");
  let found = [];
  let at = -1;

  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
  };
  const choose = (k) => {
    if (!found[k]) return;
    close();
    found[k].show();
  };
  const mark = () => [...list.children].forEach((one, k) => {
    one.setAttribute("aria-selected", String(k === at));
    if (k === at) one.scrollIntoView({ block: "nearest" });
  });
  const update = () => {
    found = input.value.trim() ? searched(getReport(), input.value.trim()) : [];
    at = found.length ? 0 : -1;
    list.replaceChildren(...(found.length ? found.map((one, k) => element("li", { role: "option", onpointerdown: (event) => { event.preventDefault(); choose(k); } },
      element("b", {}, one.kind), " ", one.text)) : [element("li", { class: "none" }, "nothing has this in its name")]));
    list.hidden = !input.value.trim();
    input.setAttribute("aria-expanded", String(!list.hidden));
    mark();
  };

  input.addEventListener("input", update);
  input.addEventListener("focus", () => { if (input.value.trim()) update(); });
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") at = Math.min(found.length - 1, at + 1);
    else if (event.key === "ArrowUp") at = Math.max(0, at - 1);
    else if (event.key === "Enter") { choose(at); return; }
    else if (event.key === "Escape") { close(); return; }
    else return;
    event.preventDefault();
    mark();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      event.preventDefault();
      input.focus();
    }
  });
}

/** What a text finds: modules by path, then nodes, then messages by value. */
function searched(report, text) {
  const wanted = text.toLowerCase();
  const [modules, nodes, rows] = [[], [], []];
  const seen = new Set();
  for (const item of report.picture.tree.items.values()) {
    if (!item.nodes && !item.block && item.path && item.path.toLowerCase().includes(wanted)) {
      modules.push({ kind: "module", text: item.path, show: () => report.showItem(item) });
    }
  }
  for (const node of report.graph.nodes) {
    if (node.message || seen.has(node.path)) continue;
    const value = node.outputs.find((one) => one.name.toLowerCase().includes(wanted));
    if (node.path.toLowerCase().includes(wanted) || value || node.op.toLowerCase() === wanted) {
      seen.add(node.path);
      nodes.push({ kind: node.op, text: node.path, show: () => report.showNode(node) });
      if (nodes.length > 4 * FOUND) break;
    }
  }
  for (const row of report.data.communication) {
    if (row.value.toLowerCase().includes(wanted)) rows.push({ kind: row.op, text: `${row.value}, ${bytesText(row.at)}`, show: () => report.chooseRow(row, true) });
  }
  const nearest = (one) => one.text.length - (one.text.toLowerCase() === wanted ? 1000 : 0);
  modules.sort((a, b) => nearest(a) - nearest(b));
  nodes.sort((a, b) => nearest(a) - nearest(b));
  const few = rows.slice(0, 8);
  return [...modules.slice(0, 12), ...nodes.slice(0, FOUND - 12 - few.length), ...few];
}
