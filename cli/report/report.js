"use strict";
// The page: reads the data, draws every section, and takes what is chosen in one section to the others.

const SECTIONS = { summary: "Summary", changes: "Changes", graph: "Graph", transfers: "Transfers", memory: "Memory", schedule: "Schedule", timeline: "Timeline" };
const section = (name) => document.getElementById(name);

/** One artifact as the page shows it. */
class Report {
  constructor(data, difference, sides) {
    Object.assign(this, { data, difference, sides });
    this.graph = readNodes(data);
    this.receives = new Map(this.graph.nodes.filter((node) => node.delivered || node.op === "Recv").map((node) => [node.tag, node]));
    this.changesOf = new Map();
    for (const change of difference ? difference.programs[0].changes : []) {
      if (!["placement", "layouts"].includes(change.kind)) continue;
      if (!this.changesOf.has(change.name)) this.changesOf.set(change.name, []);
      this.changesOf.get(change.name).push(change);
    }
  }

  draw() {
    drawSummary(this, section("summary"));
    drawChanges(this, section("changes"));
    this.drawGraph(section("graph"));
    drawTransfers(this, section("transfers"));
    drawMemory(this, section("memory"));
    for (const [name, drawn] of [["schedule", drawSchedule], ["timeline", drawTimeline]]) {
      section(name).hidden = true;
      drawn(this, section(name));
    }
    section("sections").replaceChildren(...Object.entries(SECTIONS).filter(([name]) => !section(name).hidden)
      .map(([name, title]) => element("a", { href: `#${name}`, onclick: (event) => { event.preventDefault(); section(name).scrollIntoView(); } }, title)));
  }

  drawGraph(place) {
    const panel = element("aside", { class: "panel", "aria-live": "polite", "aria-label": "What is chosen" });
    const around = element("div", { class: "drawing" });
    const modes = choice("Boxes by", [["modules", "modules"], ["ranks", "ranks, then modules"]], "modules", (mode) => {
      this.picture.mode = mode;
      this.picture.open.clear();
      this.picture.build();
    });
    const phases = this.graph.nodes.some((node) => node.phase !== "forward") ? PHASES.map((one) => [one, one]).concat([["", "all phases"]]) : [];
    this.phases = phases.length ? choice("Phase", phases, "forward", (phase) => {
      this.picture.phase = phase;
      this.picture.build();
    }) : null;
    const button = (text, title, action) => element("button", { type: "button", title, "aria-label": title, onclick: action }, text);
    place.replaceChildren(element("div", { class: "title" }, element("h2", {}, "Graph"), modes, this.phases,
      element("span", { class: "buttons" },
        button("−", "Zoom out", () => this.picture.zoomAtMiddle(0.8)), button("+", "Zoom in", () => this.picture.zoomAtMiddle(1.25)),
        button("Fit", "Fit the picture", () => this.picture.fit()),
        button("Open all", "Open all modules", () => this.picture.openAll(true)), button("Close all", "Close all modules", () => this.picture.openAll(false)))),
    element("div", { class: "drawn" }, around, panel));
    this.panel = panel;
    this.picture = new Picture(around, this, (item) => this.show(item));
    this.show(null);
  }

  changed(item) {
    if (item.nodes) return this.changesOf.has(item.path);
    if (item.changed === undefined) item.changed = item.children.some((one) => this.changed(one));
    return item.changed;
  }

  show(chosen) {
    this.panel.replaceChildren(detailsOf(this, chosen));
    this.panel.scrollTop = 0;
    if (chosen && chosen.path) history.replaceState(null, "", `#node=${encodeURIComponent(chosen.path)}`);
  }

  setPhase(phase) {
    this.picture.phase = phase;
    this.picture.build();
    if (this.phases) this.phases.querySelector("select").value = phase;
  }

  /** Shows the graph as another artifact's was shown: the same mode and phase, and what was open and chosen. */
  showAs({ mode, phase, open, chosen, view }) {
    Object.assign(this.picture, { mode, phase, open: new Set(open) });
    const [modes, phases] = section("graph").querySelectorAll(".choice select");
    modes.value = mode;
    if (phases) phases.value = phase;
    this.picture.build();
    Object.assign(this.picture, { view: { ...view } });
    this.picture.move();
    const item = chosen && [...this.picture.at.keys()].find((one) => one.id === chosen.id);
    if (item) this.picture.choose(item);
  }

  showItem(item) {
    section("graph").scrollIntoView();
    this.picture.reveal(item);
  }

  showNode(node) {
    const leaf = this.picture.leaf(node);
    if (leaf) this.showItem(leaf);
  }

  /** Shows what has a path: a module, or else a node; false where nothing has. */
  showPath(path) {
    for (const item of this.picture.tree.items.values()) {
      if (!item.nodes && !item.block && item.path === path && path) { this.showItem(item); return true; }
    }
    const node = this.graph.nodes.find((one) => one.path === path && !one.message);
    if (node) this.showNode(node);
    return !!node;
  }

  showValue(name) {
    const base = name.replace(/\.\d+$/, "");
    const node = this.graph.nodes.find((one) => !one.message && one.outputs.some((value) => value.name === name || value.name.replace(/\.\d+$/, "") === base));
    if (node) this.showNode(node);
  }

  /** Shows the message or collective of a value. */
  showRowOf(value) {
    const base = value.replace(/\.\d+$/, "");
    const row = this.data.communication.find((one) => one.value === value) || this.data.communication.find((one) => one.value === base);
    if (row) this.chooseRow(row, true);
    else this.showValue(value);
  }

  /** Shows a node that reads a value, such as a weight. */
  showReader(name) {
    const node = this.graph.nodes.find((one) => !one.message && one.inputs.some((value) => value.name === name));
    if (node) this.showNode(node);
  }

  showMemory(k) {
    drawMemory(this, section("memory"), k);
    section("memory").scrollIntoView();
  }

  /** Shows a message or collective beside the graph, with the node that gives its value in sight. */
  chooseRow(row, scrolls = false) {
    const { makers } = this.endsOf(row);
    if (makers.length) {
      const leaf = this.picture.leaf(makers[0]);
      if (leaf) this.picture.reveal(leaf);
    }
    this.show(row);
    if (scrolls) section("graph").scrollIntoView();
  }

  /** The nodes that give a row's value, and those that read it. */
  endsOf(row) {
    const tags = new Set(row.ends.map((end) => end[end.length - 1]));
    const deliveredOr = (one) => (one.delivered ? [one] : one.outputs[0].readers);
    if (row.op === "Send") {
      const sends = [...tags].map((tag) => this.graph.sends.get(tag)).filter(Boolean);
      return { makers: sends.map((node) => node.inputs[0].maker).filter(Boolean), readers: sends.flatMap((node) => this.receivers(node)).flatMap(deliveredOr).filter((one) => !one.message) };
    }
    const calls = this.graph.nodes.filter((node) => tags.has(node.tag) && !node.message);
    return { makers: calls, readers: calls.flatMap((node) => node.outputs.flatMap((value) => readersOf(this, value))) };
  }

  /** The Recv nodes of a Send, of its own tag or of an alike rank's. */
  receivers(send) {
    const row = this.data.communication[send.row];
    const own = this.receives.get(send.tag);
    if (own) return [own];
    return row ? row.ends.map(([, , tag]) => this.receives.get(tag)).filter(Boolean).slice(0, 1) : [];
  }
}

function choice(title, options, chosen, action) {
  return element("label", { class: "choice" }, `${title} `, element("select", { onchange: (event) => action(event.target.value) },
    ...options.map(([value, text]) => element("option", { value, selected: value === chosen }, text))));
}

function listenForTheme() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (theme) => {
    root.dataset.theme = theme;
    document.dispatchEvent(new Event("colours"));
  };
  set(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => {
    set(root.dataset.theme === "dark" ? "light" : "dark");
  });
  document.addEventListener("colours", () => {
    if (!shown) return;
    drawSummary(shown, section("summary"));
    drawSchedule(shown, section("schedule"));
  });
}

let shown = null;

/** Shows what an address names, such as `report.html#node=layers.0.mlp`. */
function follow(hash) {
  if (hash.startsWith("#node=")) shown.showPath(decodeURIComponent(hash.slice(6)));
}

function drawArtifact(artifact, difference, sides) {
  shown = new Report(artifact, difference, sides);
  const name = document.getElementById("name");
  name.textContent = artifact.folder.replace(/[/\\]+$/, "").split(/[/\\]/).pop();
  name.title = artifact.folder;
  shown.draw();
}

/** Shows the other artifact of two, 0 after and 1 before the change, with what was open and chosen; gives its report. */
function showSide(at) {
  const { sides, difference, picture } = shown;
  document.getElementById("side").value = at;
  drawArtifact(sides[at], difference, sides);
  shown.showAs(picture);
  return shown;
}

function start() {
  const { artifacts, difference } = JSON.parse(document.getElementById("data").textContent);
  listenForTheme();
  listenForSearch(() => shown);
  const side = document.getElementById("side");
  side.hidden = artifacts.length < 2;
  side.replaceChildren(...artifacts.map((one, k) => element("option", { value: k }, `${k ? "before" : "after"}: ${one.folder}`)));
  side.addEventListener("change", () => showSide(Number(side.value)));
  const wanted = location.hash;
  drawArtifact(artifacts[0], difference, artifacts);
  follow(wanted);
  window.addEventListener("hashchange", () => follow(location.hash));
  document.documentElement.dataset.drawn = "yes";
}

start();
