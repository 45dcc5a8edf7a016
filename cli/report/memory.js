"use strict";
// The memory of a class of ranks over the actions of a step, and what makes it up; with the values that are there at its most.

function drawMemory(report, place, chosen = 0) {
  const { data } = report;
  const [one, curve] = [data.classes[chosen], data.memory[chosen]];
  const choice = element("select", { "aria-label": "Rank", onchange: (event) => drawMemory(report, place, Number(event.target.value)) },
    ...data.classes.map((each, k) => element("option", { value: k, selected: k === chosen }, each.list.length > 1 ? `ranks ${each.ranks}` : `rank ${each.ranks}`)));
  const chart = element("div", { class: "chart", role: "img", "aria-label": "Memory over the actions of a step" });
  const under = element("div", { class: "about under", role: "status" });
  place.replaceChildren(
    element("div", { class: "title" }, element("h2", {}, "Memory over a step"), choice,
      element("span", { class: "about" }, `peak ${bytesText(one.memory.peak)}, as partc inspect says: what arenas keep is counted, which the curve leaves out`)),
    element("div", { class: "columns wide" }, element("div", {}, chart, under), element("div", {}, memoryParts(one), largestValues(report, curve))));
  const atMost = (plotted) => {  // without a cursor, the action where the memory is most
    plotted.setLegend({ idx: curve.most });
    under.textContent = mostText(curve);
  };
  const plot = () => {
    const width = chart.clientWidth;
    if (!width || !curve.what.length) return;
    const x = curve.what.map((_, k) => k);
    const kept = x.map(() => curve.kept);
    const between = curve.between.map((bytes) => curve.kept + bytes);
    const all = curve.inside.map((bytes, k) => between[k] + bytes);
    const axis = { stroke: colour("text-soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") }, font: "11px system-ui, sans-serif" };
    const series = (label, stroke, fill) => ({ label, stroke, fill, width: 1.2, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false }, value: (_, bytes) => (bytes === null ? "" : bytesText(bytes)) });
    chart.replaceChildren();
    new uPlot({
      width, height: 330, scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.08)] } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((at) => (Number.isInteger(at) ? at : "")) },
        { ...axis, size: 76, values: (_, ticks) => ticks.map((bytes) => bytesText(bytes)), splits: (_, __, low, high) => evenBytes(high) }],
      series: [{ label: "action", value: (_, at) => (at === null ? "" : at) },
        series("inside segments", colour("inside"), colour("inside-soft")),
        series("between segments", colour("between"), colour("between-soft")),
        series("kept", colour("kept"), colour("kept-soft"))],
      hooks: { setCursor: [(plotted) => {
        const at = plotted.cursor.idx;
        if (at === null || at === undefined) atMost(plotted);
        else under.textContent = `${at}: ${curve.what[at]}`;
      }] },
    }, [x, all, between, kept], chart, (plotted, ready) => {
      ready();
      atMost(plotted);
    });
  };
  whenShownOtherwise(chart, plot);
}

function mostText(curve) {
  return curve.what.length ? `most at action ${curve.most}: ${curve.what[curve.most]}` : "This rank does nothing in a step.";
}

/** Ticks of bytes that are powers of two, a few of them. */
function evenBytes(high) {
  let step = 1;
  while (high / step > 6) step *= 2;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, k) => k * step);
}

const PARTS = [["weights", (one) => one.weights + one.parameters], ["optimizer", (one) => one.optimizer], ["caches", (one) => one.caches],
  ["inputs, outputs", (one) => one.inputs_outputs], ["between segments", (one) => one.between], ["inside segments", (one) => one.inside],
  ["sessions", (one) => one.sessions], ["messages", (one) => one.messages], ["evaluation", (one) => one.evaluation], ["loading", (one) => one.loading]];

function memoryParts(one) {
  const rows = one.memory.targets.flatMap((target) => PARTS.map(([name, bytes]) => ({ name, target: target.target, bytes: bytes(target) })).filter((row) => row.bytes));
  const most = Math.max(...rows.map((row) => row.bytes), 1);
  return table([
    { title: "holds", text: (row) => row.name + (one.memory.targets.length > 1 ? ` on ${row.target}` : ""), width: "minmax(8rem, 1.4fr)" },
    { title: "bytes", text: (row) => bytesText(row.bytes), right: true, width: "minmax(8rem, 2fr)", cell: (row) => [bar(row.bytes, most, 0), bytesText(row.bytes)] },
  ], rows, { label: "Parts of the memory", height: 280 });
}

function largestValues(report, curve) {
  if (!curve.values.length) return null;
  return element("div", {}, element("h3", {}, "Largest values between segments at its most"), table([
    { title: "value", text: ([name]) => name, wide: true },
    { title: "bytes", text: ([, bytes]) => bytesText(bytes), right: true },
    { title: "actions", text: ([, , born, died]) => `${born} to ${died}`, right: true, width: "6rem" },
  ], curve.values, { label: "Largest values", height: 220, onrow: ([name]) => report.showValue(name) }),
  curve.others ? element("p", { class: "about" }, `and ${curve.others} smaller`) : null);
}
