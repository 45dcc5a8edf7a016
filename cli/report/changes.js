"use strict";
// What differs between two artifacts, as `partc diff` finds it: measures side by side, then every change with the reason for it.

const CHANGE_KINDS = { placement: "where nodes run", layouts: "how nodes are cut", shards: "what ranks hold of weights", communication: "what travels" };

function drawChanges(report, place) {
  const { difference } = report;
  if (!difference) return;
  place.hidden = false;
  const shown = (name, amount) => (["bytes", "memory", "weights"].includes(name) ? bytesText(amount) : amount.toLocaleString("en"));
  const parts = difference.programs.filter((one, k) => k === 0 || one.changes.length).flatMap((program) => {
    const measures = table([
      { title: "measure", text: (row) => row.title, wide: true },
      { title: "before", text: (row) => shown(row.name, row.before), right: true },
      { title: "after", text: (row) => shown(row.name, row.after), right: true },
      { title: "change", right: true, text: (row) => changeText(row.before, row.after),
        cell: (row) => element("span", { class: row.after > row.before ? "more" : row.after < row.before ? "less" : "" }, changeText(row.before, row.after)) },
    ], program.measures, { label: "Measures" });
    const kinds = Object.entries(CHANGE_KINDS).map(([kind, title]) => [title, program.rows.filter((row) => row.kind === kind)]).filter(([, rows]) => rows.length);
    return [
      difference.programs.length > 1 ? element("h3", {}, `program ${program.program}`) : null,
      element("div", { class: "columns" }, measures, element("div", {}, kinds.length ? null : element("p", { class: "hint" }, "Nothing is placed, cut or sent otherwise."))),
      ...kinds.flatMap(([title, rows]) => [element("h3", {}, `${title}: ${countText(rows.reduce((sum, row) => sum + row.times, 0), "change")}`), changesTable(report, rows)]),
    ];
  });
  place.replaceChildren(element("div", { class: "title" }, element("h2", {}, "Changes"),
    element("span", { class: "about" }, `from ${difference.before} to ${difference.after}; changed nodes are outlined in the graph`)), ...parts.filter(Boolean));
}

function changesTable(report, rows) {
  const sign = (row) => (!row.before ? "+" : !row.after ? "−" : "~");
  return table([
    { title: "", text: sign, width: "2rem", cell: (row) => element("span", { class: { "+": "more", "−": "less", "~": "" }[sign(row)] }, sign(row)) },
    { title: "times", text: (row) => row.times, sort: (row) => row.times, right: true, width: "4rem" },
    { title: "name", text: (row) => row.name, sort: (row) => row.name, wide: true },
    { title: "before", text: (row) => row.before || "-", sort: (row) => row.before, width: "minmax(8rem, 1.4fr)" },
    { title: "after", text: (row) => row.after || "-", sort: (row) => row.after, width: "minmax(8rem, 1.4fr)" },
    { title: "why", text: (row) => row.why, sort: (row) => row.why, wide: true },
  ], rows, { label: "Changes", height: 300, onrow: (row) => report.showPath(row.first) });
}
