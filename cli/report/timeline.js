"use strict";
// A step over time, rank by rank: what a trace measured above what the simulation plays, on one scale; zoomed and moved on a canvas.

const LANE = { height: 15, gap: 2, between: 12, left: 132 };
const KIND_COLOURS = { compute: "compute", update: "update", copy: "copy", communication: "message", memory: "copy" };
const RANKS_SHOWN = 24;

function drawTimeline(report, place) {
  const { timeline } = report.data;
  if (!timeline) return;
  place.hidden = false;
  const { simulated, measured } = timeline;
  const lanes = lanesOf(timeline);
  const whole = Math.max(simulated.seconds, measured ? measured.seconds : 0) || 1;
  const view = { begin: 0, end: whole };
  const canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": "Timeline of a step; arrow keys move it, + and - zoom, 0 shows all of it" });
  const under = element("div", { class: "about under", role: "status" }, "Hover over or click a span; drag to move, Ctrl and the wheel or + and - to zoom, 0 for the whole step.");
  const height = 22 + lanes.reduce((sum, lane) => sum + LANE.height + (lane.last ? LANE.between : LANE.gap), 0);
  let spot = null;

  const draw = () => {
    const width = canvas.parentElement.clientWidth;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    const scale = (width - LANE.left) / (view.end - view.begin);
    const x = (seconds) => LANE.left + (seconds - view.begin) * scale;
    drawTicks(pen, view, width, height, x);
    let y = 22;
    for (const lane of lanes) {
      pen.fillStyle = colour(lane.measured ? "text" : "text-soft");
      pen.fillText(lane.title, 0, y + 11, LANE.left - 8);
      pen.save();
      pen.beginPath();
      pen.rect(LANE.left, y, width - LANE.left, LANE.height);
      pen.clip();
      pen.fillStyle = colour("idle");
      pen.fillRect(Math.max(LANE.left, x(0)), y, x(lane.seconds) - x(0), LANE.height);
      lane.y = y;
      for (const span of lane.spans) {
        if (!span[4]) continue;
        const [from, to] = [x(span[3]), x(span[3] + span[4])];
        if (to < LANE.left || from > width) continue;
        pen.fillStyle = colour(KIND_COLOURS[span[0]] || "copy");
        pen.globalAlpha = spot && spot.span === span ? 1 : lane.measured ? 0.9 : 0.62;
        pen.fillRect(from, y, Math.max(0.6, to - from - 0.4), LANE.height);
        if (to - from > 40) {
          pen.globalAlpha = 1;
          pen.fillStyle = colour("on-colour");
          pen.fillText(shortened(span[2] || span[1], Math.floor((to - from - 8) / 6.2)), Math.max(from, LANE.left) + 4, y + 11);
        }
      }
      pen.globalAlpha = 1;
      pen.restore();
      y += LANE.height + (lane.last ? LANE.between : LANE.gap);
    }
  };

  const find = (event) => {
    const { left, top, width } = canvas.getBoundingClientRect();
    const seconds = view.begin + ((event.clientX - left - LANE.left) / (width - LANE.left)) * (view.end - view.begin);
    const lane = lanes.find((one) => event.clientY - top >= one.y && event.clientY - top < one.y + LANE.height);
    const slack = (1.5 * (view.end - view.begin)) / width;
    const span = lane && lane.spans.find((one) => seconds >= one[3] - slack && seconds <= one[3] + one[4] + slack);
    return { lane, span, seconds };
  };
  const say = ({ lane, span }) => {
    if (!span) return;
    const [, what, path, begin, seconds, bytes] = span;
    const other = lane.other && lane.other.get(nameOf(what));
    under.textContent = `${lane.title}: ${what}${path && !what.includes(path) ? ` (${path})` : ""}, ${secondsText(seconds)} at ${secondsText(begin)}${bytes ? `, ${bytesText(bytes)}` : ""}`
      + (other === undefined || other === null ? "" : `; ${lane.measured ? "simulated" : "measured"} ${secondsText(other)}`);
  };
  const zoom = (factor, at) => {
    const [begin, end] = [at + (view.begin - at) * factor, at + (view.end - at) * factor];
    if (end - begin > whole * 1.5 || end - begin < 1e-7) return;
    Object.assign(view, { begin, end });
    draw();
  };
  let from = null;
  canvas.addEventListener("pointerdown", (event) => { from = { x: event.clientX, ...view }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (from) {
      const by = ((from.x - event.clientX) / (canvas.clientWidth - LANE.left)) * (from.end - from.begin);
      Object.assign(view, { begin: from.begin + by, end: from.end + by });
      draw();
      return;
    }
    const found = find(event);
    if (found.span && (!spot || spot.span !== found.span)) { spot = found; say(found); draw(); }
  });
  canvas.addEventListener("pointerup", (event) => {
    const still = from && Math.abs(event.clientX - from.x) < 4;
    from = null;
    const found = find(event);
    if (still && found.span) { say(found); if (found.span[2]) report.showPath(found.span[2].replace(/, \d+[FBW]\d+$/, ""), false); }
  });
  canvas.addEventListener("wheel", (event) => {
    if (!(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return;
    event.preventDefault();
    zoom(Math.exp(event.deltaY * 0.0016), find(event).seconds);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key] || 0;
    const width = view.end - view.begin;
    if (by) Object.assign(view, { begin: view.begin + by * width, end: view.end + by * width });
    else if (event.key === "0") Object.assign(view, { begin: 0, end: whole });
    else if (event.key === "+" || event.key === "=") { zoom(0.8, (view.begin + view.end) / 2); return; }
    else if (event.key === "-") { zoom(1.25, (view.begin + view.end) / 2); return; }
    else return;
    event.preventDefault();
    draw();
  });

  const key = ["compute", "update", "communication", "copy"].map((kind) => element("span", { class: "key" }, element("i", { style: `background:var(--${KIND_COLOURS[kind]})` }), kind));
  place.replaceChildren(...[
    element("div", { class: "title" }, element("h2", {}, "Timeline"), element("span", { class: "about" }, timelineText(timeline))),
    element("div", { class: "legend" }, ...key, leftOut(timeline)), element("div", { class: "lanes" }, canvas), under,
    measured ? shareTable(lanes) : null,
    element("div", { class: "columns" }, comparedTable(report, lanes, !!measured), criticalTable(report, simulated)),
  ].filter(Boolean));
  whenShownOtherwise(canvas.parentElement, draw);
}

function drawTicks(pen, view, width, height, x) {
  const span = view.end - view.begin;
  const step = 10 ** Math.floor(Math.log10(span / 5));
  const each = [1, 2, 5, 10].map((one) => one * step).find((one) => span / one <= 9);
  pen.strokeStyle = colour("line");
  pen.fillStyle = colour("text-soft");
  for (let at = Math.ceil(Math.max(0, view.begin) / each) * each; at < view.end; at += each) {
    const place = Math.round(x(at)) + 0.5;
    if (place < LANE.left) continue;
    pen.beginPath();
    pen.moveTo(place, 16);
    pen.lineTo(place, height);
    pen.stroke();
    pen.fillText(secondsText(Number(at.toPrecision(6))), place + 2, 11);
  }
}

/** How many ranks have no lanes, where they are many. */
function leftOut({ simulated, measured }) {
  const number = (measured || simulated).ranks.length;
  return number > RANKS_SHOWN ? element("span", { class: "key" }, `the first ${RANKS_SHOWN} of ${number} ${measured ? "ranks" : "classes of ranks"}`) : null;
}

function timelineText({ simulated, measured, by }) {
  if (!measured) return `simulated on the machine: a step takes ${secondsText(simulated.seconds)}`;
  const how = by === "trace" ? "simulated by the trace's medians" : "simulated on the machine";
  const cut = measured.whole ? "" : "; the trace is cut short";
  return `${measured.trace}: ${countText(measured.steps, "step")}, median ${secondsText(measured.median)}, step ${measured.step} shown; ${how} ${secondsText(simulated.seconds)}, ${(simulated.seconds / measured.median).toFixed(3)} of the median${cut}`;
}

/** The lanes from top to bottom; a measured one has beneath it the simulated one of the rank's class. */
function lanesOf({ simulated, measured }) {
  const played = (row, title) => ({ title, seconds: simulated.seconds, spans: row.spans, last: true, rank: row.first });
  if (!measured) return simulated.ranks.slice(0, RANKS_SHOWN).map((row) => played(row, `rank${row.ranks.match(/[-,]/) ? "s" : ""} ${row.ranks}`));
  const classOf = new Map(simulated.ranks.flatMap((row) => ranksOf(row.ranks).map((rank) => [rank, row])));
  return measured.ranks.slice(0, RANKS_SHOWN).flatMap((row) => {
    const other = classOf.get(row.rank);
    const mine = { title: `rank ${row.rank}, measured`, seconds: row.seconds, spans: row.spans, measured: true, rank: row.rank, last: !other };
    if (!other) return [mine];
    const theirs = played(other, `rank ${row.rank}, simulated`);
    mine.other = new Map(other.spans.map((span) => [nameOf(span[1]), span[4]]));
    theirs.other = new Map(row.spans.map((span) => [nameOf(span[1]), span[4]]));
    return [mine, theirs];
  });
}

/** An action's name without ranks, in which those of alike ranks differ. */
function nameOf(what) {
  return what.replace(/\branks? [\d, :-]+/g, "");
}

/** Ranks as partc writes them: 0-3,8 or 0-24:8. */
function ranksOf(text) {
  return text.split(",").flatMap((part) => {
    const [, first, last, step] = part.match(/^(\d+)(?:-(\d+))?(?::(\d+))?$/).map((one) => (one === undefined ? undefined : Number(one)));
    const found = [];
    for (let rank = first; rank <= (last === undefined ? first : last); rank += step || 1) found.push(rank);
    return found;
  });
}

/** By rank what its time went to in the measured step, beside what it computes in the simulated one. */
function shareTable(lanes) {
  const sum = (lane, ...kinds) => lane.spans.filter((span) => kinds.includes(span[0])).reduce((total, span) => total + span[4], 0);
  const rows = lanes.flatMap((lane, k) => {
    if (!lane.measured) return [];
    const theirs = lanes[k + 1] && !lanes[k + 1].measured ? sum(lanes[k + 1], "compute", "update") : null;
    const row = { rank: lane.rank, seconds: lane.seconds, compute: sum(lane, "compute", "update"), theirs, waits: sum(lane, "communication"), copies: sum(lane, "copy", "memory") };
    return [{ ...row, rest: Math.max(0, row.seconds - row.compute - row.waits - row.copies) }];
  });
  const column = (title, key) => ({ title, text: (row) => (row[key] === null ? "" : secondsText(row[key])), sort: (row) => row[key] || 0, right: true });
  return element("div", {}, element("h3", {}, "Where the time of each rank went in this step"), table([
    { title: "rank", text: (row) => row.rank, sort: (row) => row.rank }, column("step", "seconds"), column("compute", "compute"), column("simulated compute", "theirs"),
    column("communication", "waits"), column("copies", "copies"), column("between actions", "rest"),
  ], rows, { label: "Time of each rank", height: 300 }));
}

function comparedTable(report, lanes, measured) {
  const rows = lanes.filter((lane) => !measured || lane.measured).flatMap((lane) => lane.spans.map((span) => ({ lane, span, other: lane.other ? lane.other.get(nameOf(span[1])) : undefined })))
    .filter((row) => row.span[4] > 0).sort((a, b) => b.span[4] - a.span[4]).slice(0, 200);
  return element("div", {}, element("h3", {}, "Longest actions"), table([
    { title: "rank", text: (row) => row.lane.rank, sort: (row) => row.lane.rank, width: "4rem" },
    { title: "action", text: (row) => row.span[1], sort: (row) => row.span[1], wide: true },
    { title: measured ? "measured" : "simulated", text: (row) => secondsText(row.span[4]), sort: (row) => row.span[4], right: true, width: "6rem" },
    ...(measured ? [{ title: "simulated", text: (row) => (row.other === undefined ? "" : secondsText(row.other)), sort: (row) => row.other || 0, right: true, width: "6rem" }] : []),
  ], rows, { label: "Longest actions", height: 300, onrow: (row) => row.span[2] && report.showPath(row.span[2].replace(/, \d+[FBW]\d+$/, "")) }));
}

function criticalTable(report, simulated) {
  return element("div", {}, element("h3", {}, "On the critical path of the simulated step"), table([
    { title: "module", text: (row) => row.name || "(no name)", sort: (row) => row.name, wide: true },
    { title: "time", text: (row) => secondsText(row.seconds), sort: (row) => row.seconds, right: true },
    { title: "share", text: (row) => `${((100 * row.seconds) / (simulated.seconds || 1)).toFixed(1)} %`, right: true },
  ], simulated.critical, { label: "Critical path", height: 300 }));
}
