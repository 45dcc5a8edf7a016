"use strict";
// Numbers as people read them, in the units of partc's tables.

/** Bytes: 188 KiB, 1.94 MiB. */
function bytesText(bytes) {
  if (bytes === null || bytes === undefined) return "?";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  let size = Math.abs(bytes);
  while (size >= 1024 && at < units.length - 1) {
    size /= 1024;
    at += 1;
  }
  const digits = at === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return `${bytes < 0 ? "-" : ""}${size.toFixed(digits)} ${units[at]}`;
}

/** Seconds: 12.4 ms. */
function secondsText(seconds) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
    if (Math.abs(seconds) >= size) return `${(seconds / size).toPrecision(3)} ${unit}`;
  }
  return seconds ? `${(seconds * 1e9).toFixed(0)} ns` : "0 s";
}

/** A number of things: 1 rank, 1,024 ranks. */
function countText(number, name) {
  return `${number.toLocaleString("en")} ${name}${number === 1 ? "" : name.endsWith("ss") ? "es" : "s"}`;
}

/** Ranks in ascending order as partc writes them: 0-2,5. */
function ranksInRuns(ranks) {
  const runs = [];
  for (const rank of ranks) {
    const last = runs[runs.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`)).join(",");
}

/** How much larger the second is: +5.0 %, =, new. */
function changeText(before, after) {
  if (before === after) return "=";
  if (!before) return "new";
  const percent = (100 * (after - before)) / before;
  return `${percent > 0 ? "+" : ""}${percent.toPrecision(3)} %`;
}
