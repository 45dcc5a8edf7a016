"use strict";
// What differs between two artifacts, as `partc diff` finds it: measures side by side, then every change with the reason for it.

const CHANGE_KINDS = { placement: "where nodes run", layouts: "how nodes are cut", shards: "what ranks hold of weights", communication: "what travels" };

function drawChanges(report, place) {
  const { difference } = report;
  if (!difference) return;
  place.hidden = false;
  const shown = (name, amount) => (name === "time" ? secondsText(amount * 1e-9) : ["bytes", "memory", "weights"].includes(name) ? bytesText(amount) : amount.toLocaleString("en"));
  const parts = difference.programs.filter((one, k) => k === 0 || one.changes.length).map((program, k) => {
    const title = `program ${program.program}`;
    const [isAfter, isBefore] = report.sides.map((one) => one.programs.includes(program.program));
    if (!isAfter || !isBefore) return element("p", { class: "hint" }, `${title}: ${difference[isAfter ? "after" : "before"]} alone has it`);
    const measures = table([
      { title: "measure", text: (row) => row.title, wide: true },
      { title: "before", text: (row) => shown(row.name, row.before), right: true },
      { title: "after", text: (row) => shown(row.name, row.after), right: true },
      { title: "change", right: true, text: (row) => changeText(row.before, row.after),
        cell: (row) => element("span", { class: row.after > row.before ? "more" : row.after < row.before ? "less" : "" }, changeText(row.before, row.after)) },
    ], program.measures, { label: "Measures", wraps: true });
    const kinds = Object.entries(CHANGE_KINDS).map(([kind, title]) => [title, program.rows.filter((row) => row.kind === kind)]).filter(([, rows]) => rows.length);
    const inside = [
      element("div", { class: "columns" }, measures, program.program === report.data.program ? ranksBeside(report.sides) : null),
      kinds.length ? null : element("p", { class: "hint" }, "Nothing is placed, cut or sent otherwise."),
      ...kinds.flatMap(([title, rows]) => [element("h3", {}, `${title}: ${countText(rows.reduce((sum, row) => sum + row.times, 0), "change")}`), changesTable(report, program, rows)]),
    ].filter(Boolean);
    if (k) return element("details", {}, element("summary", {}, `${title}: ${countText(program.changes.length, "change")}`), ...inside);
    return element("div", {}, difference.programs.length > 1 ? element("h3", {}, title) : null, ...inside);
  });
  place.replaceChildren(element("div", { class: "title" }, element("h2", {}, "Changes"),
    element("span", { class: "about" }, `from ${difference.before} to ${difference.after}; changed nodes are outlined in the graph`)), ...parts);
}

/** The ranks of both artifacts side by side; those that are alike in both are one row. */
function ranksBeside([after, before]) {
  const classOf = (data) => new Map(data.classes.flatMap((one) => one.list.map((rank) => [rank, one])));
  const [old, now] = [classOf(before), classOf(after)];
  const rows = new Map();
  for (let rank = 0; rank < Math.max(before.ranks, after.ranks); rank += 1) {
    const key = `${old.has(rank) ? old.get(rank).ranks : ""}/${now.has(rank) ? now.get(rank).ranks : ""}`;
    if (!rows.has(key)) rows.set(key, { ranks: [], old: old.get(rank), now: now.get(rank) });
    rows.get(key).ranks.push(rank);
  }
  const pair = (title, amount) => ["old", "now"].map((side) => ({
    title: `${title} ${side === "old" ? "before" : "after"}`, right: true, width: "minmax(6.5rem, 1fr)",
    text: (row) => (row[side] ? bytesText(amount(row[side])) : "-"),
    cell: side === "old" ? null : (row) => {
      if (!row.old || !row.now) return row.now ? bytesText(amount(row.now)) : "-";
      const [was, is] = [amount(row.old), amount(row.now)];
      return element("span", { class: is > was ? "more" : is < was ? "less" : "" }, bytesText(is));
    },
  }));
  return table([{ title: "rank", text: (row) => ranksInRuns(row.ranks) }, ...pair("peak", (one) => one.memory.peak), ...pair("sent", (one) => one.stats.sent.bytes)],
    [...rows.values()], { label: "Ranks before and after", height: 200 });
}

/** The name of the first change that a row stands for. */
function firstName(program, row) {
  const star = (name) => name.replace(/\d+/g, "*");
  const found = program.changes.find((one) => one.kind === row.kind && one.before === row.before && one.after === row.after && star(one.name) === star(row.name));
  return found ? found.name : row.name;
}

/** Shows what a change is of, on the side that has it: a node by its path, a weight or what travels by the value. */
function showChange(page, program, row) {
  const side = page.sides.indexOf(page.data);
  const report = [row.after, row.before][side] ? page : showSide(1 - side);
  const name = firstName(program, row);
  const value = row.kind === "communication" ? name.replace(/^\S+ /, "").replace(/: [^:]*$/, "") : name;
  return row.kind === "communication" ? report.showRowOf(value) : report.showPath(value) || report.showReader(value);
}

function changesTable(report, program, rows) {
  const sign = (row) => (!row.before ? "+" : !row.after ? "−" : "~");
  return table([
    { title: "", text: sign, width: "2rem", cell: (row) => element("span", { class: { "+": "more", "−": "less", "~": "" }[sign(row)] }, sign(row)) },
    { title: "times", text: (row) => row.times, sort: (row) => row.times, right: true, width: "4rem" },
    { title: "name", text: (row) => row.name, sort: (row) => row.name, wide: true },
    { title: "before", text: (row) => row.before || "-", sort: (row) => row.before, width: "minmax(8rem, 1.4fr)" },
    { title: "after", text: (row) => row.after || "-", sort: (row) => row.after, width: "minmax(8rem, 1.4fr)" },
    ...(rows.some((row) => row.why) ? [{ title: "why", text: (row) => row.why, sort: (row) => row.why, wide: true }] : []),
  ], rows, { label: "Changes", height: 300, onrow: program.program === report.data.program ? (row) => showChange(report, program, row) : null });
}
