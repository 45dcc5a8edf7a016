"use strict";
// Every message and collective: alike ones, of alike ranks and of all microbatches, are one row, which lists each when it is chosen.

function drawTransfers(report, place) {
  const { communication } = report.data;
  const count = element("span", { class: "about" });
  const listed = table([
    { title: "op", text: (row) => row.op, sort: (row) => row.op, width: "minmax(6rem, 1fr)", cell: (row) => element("span", { class: `op ${row.op === "Send" ? "message" : "collective"}` }, row.op) },
    { title: "ranks", text: endsText, sort: endsText },
    { title: "value", text: (row) => row.value, sort: (row) => row.value, wide: true },
    { title: "type", text: (row) => row.type, sort: (row) => row.type, width: "minmax(8rem, 1.6fr)" },
    { title: "bytes", text: (row) => row.bytes, sort: (row) => row.at || 0, right: true, width: "minmax(7rem, 1.3fr)" },
    { title: "at these sizes", text: (row) => bytesText(row.at), sort: (row) => row.at || 0, right: true, width: "minmax(6.5rem, 1fr)" },
    { title: "times", text: (row) => row.times, sort: (row) => row.times, right: true, width: "4.5rem" },
    { title: "cause", text: (row) => row.cause, sort: (row) => row.cause, wide: true },
  ], communication, { label: "All transfers", height: 420, sorted: 5, onrow: (row) => report.chooseRow(row, true) });
  const filter = element("input", { type: "search", class: "filter", placeholder: "Filter: part of a value, a cause, an op, or 0 → 4", "aria-label": "Filter transfers" });
  const apply = () => {
    const text = filter.value.trim().toLowerCase();
    const left = listed.filter((row) => !text || [row.op, row.value, row.type, row.cause, endsText(row)].some((one) => one.toLowerCase().includes(text)));
    count.textContent = `${left.toLocaleString("en")} of ${countText(communication.length, "row")}, ${communication.reduce((sum, row) => sum + row.times, 0).toLocaleString("en")} transfers`;
  };
  filter.addEventListener("input", apply);
  apply();
  place.replaceChildren(element("div", { class: "title" }, element("h2", {}, "Transfers"), filter, count), listed);
}

function endsText(row) {
  if (row.op !== "Send") {
    if (row.axes) return `${row.axes}: ${row.lists.slice(0, 2).join(" | ")}${row.lists.length > 2 ? " ..." : ""}`;
    return row.lists.length > 1 ? `${row.lists.length} lists: ${row.lists[0]}` : row.lists[0] || "";
  }
  const pairs = [...new Set(row.ends.map(([from, to]) => `${from} → ${to}`))];
  return pairs.length > 1 ? `${pairs[0]} and ${pairs.length - 1} more` : pairs[0];
}
