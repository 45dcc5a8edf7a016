"use strict";
// The first screen: what the job is, what each class of ranks holds and sends, and the largest messages with their causes.

function drawSummary(report, place) {
  const { data } = report;
  const most = Math.max(...data.classes.map((one) => one.memory.peak));
  const largest = data.classes.find((one) => one.memory.peak === most);
  const sizes = Object.entries(data.sizes).map(([name, size]) => `${name}=${size}`).join(", ");
  const grids = data.meshes.filter((one) => one.grid).map((one) => one.grid);
  const lists = data.meshes.filter((one) => one.lists);
  const cards = [
    card("ranks", data.ranks.toLocaleString("en"), data.classes.length < data.ranks ? `${countText(data.classes.length, "class")} of alike ranks` : ""),
    card("plan", data.plan || "none", `${data.model}, program ${data.program}`),
    card("mesh", Object.entries(data.mesh).map(([name, size]) => `${name}=${size}`).join(" ") || meshText(grids, lists), lists.length ? `${grids.map((one) => one.replace(/ as .*$/, "").replace("ranks ", "")).slice(0, 3).join("; ")}${grids.length ? "; " : ""}${countText(lists.reduce((sum, one) => sum + one.collectives, 0), "collective")}` : "no collectives",
      [...grids, ...lists.map((one) => `${one.collectives} over ${one.lists.slice(0, 8).join(" | ")}${one.lists.length > 8 ? " ..." : ""}`)].join("\n")),
    card("sent in a step", bytesText(data.measures.bytes), `${data.measures.messages.toLocaleString("en")} messages and collectives`),
    card("largest peak memory", bytesText(most), `rank ${largest.list[0]}${largest.list.length > 1 ? ` and ${largest.list.length - 1} alike` : ""}`),
    sizes ? card("sizes", sizes, data.given.length ? "as given by --set" : "typical; --set changes them") : null,
  ];
  place.replaceChildren(
    element("div", { class: "cards" }, ...cards),
    element("div", { class: "columns" },
      element("div", {}, element("h2", {}, data.classes.length < data.ranks ? "Ranks, alike ones in one row" : "Ranks"), ranksTable(report, most)),
      element("div", {}, element("h2", {}, "Largest transfers of a step"), largestTable(report))));
}

function card(name, value, about, title = "") {
  return element("div", { class: "card", title: title || null }, element("div", { class: "name" }, name), element("div", { class: "value" }, value), element("div", { class: "about" }, about));
}

function meshText(grids, lists) {
  const sizes = [...new Set(grids.map((one) => one.replace(/^.* as /, "")))];
  if (sizes.length) return sizes.slice(0, 2).join(", ");
  const longest = lists.reduce((best, one) => (one.lists[0].length > best.length ? one.lists[0] : best), "");
  return longest ? `ranks ${longest}` : "none";
}

function bar(part, whole, k) {
  return element("span", { class: "bar", style: `--part:${whole ? (100 * part) / whole : 0}%;--hue:${hue(k)}` });
}

function ranksTable(report, most) {
  const rows = report.data.classes.map((one, k) => ({ ...one, k }));
  const sent = (row) => row.stats.sent, axes = Object.keys(report.data.mesh);
  const moved = (one) => bytesText(one.bytes) + (one.unknown ? "+?" : "");
  return table([
    { title: "rank", text: (row) => row.ranks, sort: (row) => row.list[0], cell: (row) => [element("i", { class: "dot", style: `background:${hue(row.k)}` }), row.ranks] },
    ...(axes.length ? [{ title: axes.join(", "), text: (row) => axes.map((name) => row.at[name]).join(", "), sort: (row) => row.list[0], width: "minmax(6rem, 1.2fr)" }] : []),
    { title: "nodes", text: (row) => row.stats.nodes.toLocaleString("en"), sort: (row) => row.stats.nodes, right: true },
    { title: "weights", text: (row) => bytesText(row.stats.weights), sort: (row) => row.stats.weights, right: true },
    { title: "peak memory", text: (row) => bytesText(row.memory.peak), sort: (row) => row.memory.peak, right: true, width: "minmax(8.5rem, 2fr)",
      cell: (row) => [bar(row.memory.peak, most, row.k), bytesText(row.memory.peak)] },
    { title: "received", text: (row) => moved(row.stats.received), sort: (row) => row.stats.received.bytes, right: true },
    { title: "sent", text: (row) => moved(sent(row)), sort: (row) => sent(row).bytes, right: true },
  ], rows, { label: "Ranks", height: 300, onrow: (row) => report.showMemory(row.k) });
}

function largestTable(report) {
  const total = (row) => (row.at || 0) * row.times;
  const rows = report.data.communication.slice().sort((a, b) => total(b) - total(a)).slice(0, 8);
  if (!rows.length) return element("p", { class: "hint" }, "The ranks send nothing.");
  return table([
    { title: "what", text: (row) => `${row.op} ${row.value}`, wide: true, cell: (row) => [element("span", { class: `op ${row.op === "Send" ? "message" : "collective"}` }, row.op), ` ${row.value}`] },
    { title: "bytes", text: (row) => `${bytesText(row.at)}${row.times > 1 ? ` × ${row.times}` : ""}`, right: true, width: "minmax(8.5rem, 1fr)" },
    { title: "cause", text: (row) => row.cause, wide: true },
  ], rows, { label: "Largest transfers", height: 300, onrow: (row) => report.chooseRow(row, true) });
}
