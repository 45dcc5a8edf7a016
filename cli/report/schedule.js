"use strict";
// The schedule of a pipeline as a grid: a row for the ranks that have one row of tasks, time from left to right, in units.

const CELL = { height: 26, gap: 3 };
const KINDS = { F: "forward", B: "backward", W: "weights' gradients" };

function drawSchedule(report, place) {
  const { schedule } = report.data;
  if (!schedule) return;
  place.hidden = false;
  const unit = Math.max(16, Math.min(46, 1100 / Math.max(1, schedule.total)));
  const left = 110;
  const width = left + schedule.total * unit + 20;
  const height = schedule.homes.length * (CELL.height + CELL.gap) + 30;
  const critical = new Set(schedule.critical);
  const grid = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Schedule" });
  const shown = element("div", { class: "about under", role: "status" }, "Choose a task to follow its microbatch through the stages.");
  const tick = Math.max(1, Math.ceil(40 / unit));
  for (let at = 0; at <= schedule.total; at += tick) {
    grid.append(shape("line", { x1: left + at * unit, x2: left + at * unit, y1: 18, y2: height - 8, class: "tick" }),
      shape("text", { x: left + at * unit, y: 12, class: "about middle" }, at));
  }
  const all = [];
  schedule.homes.forEach((home, k) => {
    const y = 20 + k * (CELL.height + CELL.gap);
    grid.append(shape("text", { x: 0, y: y + 17, class: "title" }, `rank${home.ranks.match(/[-,]/) ? "s" : ""} ${home.ranks}`),
      shape("rect", { x: left, y, width: schedule.total * unit, height: CELL.height, class: "idle" }));
    for (const [name, stage, kind, microbatch, begin, end] of home.tasks) {
      const choose = () => {
        all.forEach((one) => one.made.classList.toggle("faded", one.microbatch !== microbatch));
        shown.textContent = `${name}: ${KINDS[kind]} of stage ${stage}, microbatch ${microbatch}, from ${begin} to ${end}${critical.has(name) ? "; on the critical path" : ""}`;
      };
      const wide = (end - begin) * unit - 1;
      const made = shape("g", { class: `task ${kind}${critical.has(name) ? " critical" : ""}`, tabindex: "0", role: "button", "aria-label": `${name} from ${begin} to ${end}`, onclick: choose,
        onkeydown: (event) => { if (event.key === "Enter") choose(); } },
      shape("rect", { x: left + begin * unit, y, width: wide, height: CELL.height, rx: 3, fill: hue(microbatch), "fill-opacity": { F: 0.95, B: 0.6, W: 0.35 }[kind] }),
      wide > 22 ? shape("text", { x: left + begin * unit + wide / 2, y: y + 17, class: "middle" }, name) : null,
      shape("title", {}, `${name}: ${KINDS[kind]} of stage ${stage}, microbatch ${microbatch}`));
      all.push({ made, microbatch });
      grid.append(made);
    }
  });
  const rows = table([
    { title: "ranks", text: (row) => row.ranks }, { title: "stages", text: (row) => row.stages.join(", ") },
    { title: "tasks", text: (row) => row.tasks.length, right: true },
    { title: "idle", text: (row) => `${row.idle} (${((100 * row.idle) / schedule.total).toFixed(1)} %)`, right: true },
    { title: "keeps microbatches", text: (row) => row.microbatches, right: true },
    { title: "kept for backward passes", text: (row) => row.kept, wide: true },
    { title: "at these sizes", text: (row) => bytesText(row.kept_at), right: true },
  ], schedule.homes, { label: "Rows of the schedule" });
  place.replaceChildren(
    element("div", { class: "title" }, element("h2", {}, "Schedule"), element("span", { class: "about" },
      `${schedule.name}, ${countText(schedule.microbatches, "microbatch").replace("microbatchs", "microbatches")}; in units, F = B = W = 1 of a rank: total ${schedule.total}, bubble ${(100 * schedule.bubble).toFixed(1)} %`)),
    element("div", { class: "scroller grid", tabindex: "0", "aria-label": "Schedule grid" }, grid), shown,
    element("p", { class: "about" }, "A colour for each microbatch: strong is forward (F), lighter backward (B), lightest the gradients of weights (W). An outline marks the critical path."),
    rows);
}
