// The graph: draws the edges beside the rows, and loads the windows above and below.
//
// Rows are in topological order, the latest first. A lane is a column that leads to an event further
// down: the parent of a row above. Each row takes the leftmost lane that leads to it, ends the
// others, and opens a lane for each parent that has none yet.
//
//     lanes before   row     lanes after
//     [7]            7 → 5, 6    [5, 6]      a merge
//     [5, 6]         6 → 4       [5, 4]
//     [5, 4]         5 → 4       [4]         a fork: two lanes led to 4

const LANES_MAX = 14; // further ones share the last column
const WINDOWS_MAX = 6; // in the document; others are loaded again
const AHEAD = 3; // screens that are loaded before they are needed
const AGAIN_MS = 2000; // after a request that failed
const COLOURS = 6;
const SVG = "http://www.w3.org/2000/svg";

const policy = window.trustedTypes?.createPolicy("inspector", { createHTML: (text) => text });

/** The rows of an answer. It comes from our own templates, in which every value is escaped. */
function listOf(text) {
  const parsed = new DOMParser().parseFromString(policy ? policy.createHTML(text) : text, "text/html");
  const holder = document.createElement("div");
  holder.append(document.adoptNode(parsed.querySelector("ol.rows")));
  return holder.firstChild;
}

// Not `offsetHeight`: it is rounded, and a hundred rows add that up to more than one row.
const heightOf = (element) => element.getBoundingClientRect().height;
const numbers = (text) => (text ? text.split(" ") : []);

class Rows {
  constructor(list) {
    this.list = document.createElement("div"); // the rows, and their picture
    this.list.className = "window";
    list.before(this.list);
    this.list.append(list);
    this.rows = [...list.querySelectorAll(".row")].map((element) => {
      const { nid, parents, missing, place } = element.dataset;
      const gaps = new Set(numbers(missing));
      return {
        element, nid, place, gaps: gaps.size,
        parents: [...new Set(numbers(parents))].filter((one) => !gaps.has(one)),
        kind: element.classList.contains("rejected") ? "rejected"
          : element.classList.contains("soft-failed") ? "soft-failed"
          : element.querySelector(".flag")?.textContent === "state" ? "state" : "event",
      };
    });
    this.before = null; // lanes above the first row: [{ to, from: [columns] }, or null]
    this.after = null;
  }
  get first() { return this.rows[0].place; }
  get last() { return this.rows[this.rows.length - 1].place; }
}

class Graph {
  constructor(box) {
    this.box = box;
    this.windows = [];
    this.isTop = box.dataset.top === "yes";
    this.isBottom = false;
    this.lanesKnown = new Map(); // by the first place of a window: the lanes above it
    this.isLoading = false;
    this.hasNews = false; // that arrived while rows were loaded
    this.turn = 0; // of the request whose answer is wanted: a jump takes it from an older one
    this.columns = 1;
    const list = box.querySelector("ol.rows");
    if (list.querySelector(".row")) this.windows.push(new Rows(list));
    this.layout();
    box.dataset.ready = "yes";
    box.addEventListener("scroll", () => this.fill(), { passive: true });
    window.addEventListener("resize", () => this.layout(true));
    document.addEventListener("news", () => this.news());
    document.addEventListener("back", () => this.news());
    this.fill();
  }

  // Windows ----------------------------------------------------------------------------------------

  async fetch(parameters) {
    const address = new URL(this.box.dataset.rows, location.href);
    for (const [name, value] of Object.entries(parameters)) address.searchParams.set(name, value);
    const answer = await fetch(address, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    return new Rows(listOf(await answer.text()));
  }

  /** Load what is near: below first. One request at a time. */
  fill() {
    if (this.isLoading || this.windows.length === 0) return;
    const { scrollTop, clientHeight, scrollHeight } = this.box;
    const below = scrollHeight - scrollTop - clientHeight;
    const [first, last] = [this.windows[0].first, this.windows[this.windows.length - 1].last];
    if (!this.isBottom && below < AHEAD * clientHeight) {
      this.load({ below: last }, (found) => this.append(found));
    } else if (!this.isTop && scrollTop < AHEAD * clientHeight) {
      this.load({ above: first }, (found) => this.prepend(found));
    }
  }

  /** Show an answer, unless another one is wanted since. A request that fails is sent again. */
  async load(parameters, show) {
    const turn = this.turn += 1;
    this.setLoading(true);
    const found = await this.fetch(parameters).catch(() => null);
    if (turn !== this.turn) return;
    if (found === null) {
      setTimeout(() => { if (turn === this.turn) this.load(parameters, show); }, AGAIN_MS);
      return;
    }
    show(found);
    this.setLoading(false);
    if (this.hasNews) this.news();
    this.fill();
  }

  setLoading(isLoading) {
    this.isLoading = isLoading;
    this.box.setAttribute("aria-busy", String(isLoading));
    this.box.dataset.bottom = this.isBottom ? "yes" : "no";
  }

  append(found) {
    if (found.rows.length === 0) { this.isBottom = true; return; }
    const gone = this.windows.splice(0, this.windows.length + 1 - WINDOWS_MAX);
    const height = gone.reduce((sum, one) => sum + heightOf(one.list), 0);
    this.windows.push(found);
    if (gone.length) this.isTop = false;
    this.layout();
    this.box.append(found.list);
    for (const one of gone) one.list.remove();
    if (height) this.box.scrollTop -= height;
  }

  prepend(found) {
    if (found.rows.length === 0) { this.isTop = true; return; }
    const height = this.rowHeight() * found.rows.length;
    this.windows.unshift(found);
    const gone = this.windows.splice(WINDOWS_MAX);
    if (gone.length) this.isBottom = false;
    this.layout();
    this.box.prepend(found.list);
    for (const one of gone) one.list.remove();
    this.box.scrollTop += height;
  }

  /** Show one window alone: the latest, or that at a position. */
  reset(found, isTop) {
    for (const one of this.windows) one.list.remove();
    this.windows = found.rows.length ? [found] : [];
    this.box.append(found.list);
    this.isTop = isTop;
    this.isBottom = false;
    this.box.scrollTop = 0;
    this.layout();
  }

  /** The height of each row, in pixels and their parts, as the rows that are shown have it. */
  rowHeight() { return heightOf(this.box.querySelector(".row")); }

  jump(position) { this.load({ at: position }, (found) => this.reset(found, false)); }
  newest() {
    document.getElementById("newest").hidden = true;
    this.load({}, (found) => this.reset(found, true));
  }

  /** New events may lie anywhere, so the latest window is read again, if it is the one in sight. */
  news() {
    this.hasNews = this.isLoading;
    if (this.isLoading) return;
    if (this.isTop && this.box.scrollTop < 80) this.newest();
    else document.getElementById("newest").hidden = false;
  }

  // Lanes ------------------------------------------------------------------------------------------

  // It reads the sizes of what is shown before it writes, and so can draw a window that is not in the
  // document yet. Then each new window costs the browser one layout.
  layout(isForced = false) {
    if (this.windows.length === 0) return;
    const [height, isNarrow] = [this.rowHeight(), this.box.clientWidth < 600];
    let lanes = this.lanesKnown.get(this.windows[0].first) ?? [];
    const drawn = this.windows.map((part, number) => {
      const key = JSON.stringify(lanes);
      this.lanesKnown.set(part.first, lanes);
      const isSame = part.before === key && !isForced;
      const drawing = isSame ? null : place(part.rows, lanes, number === 0 && this.isTop);
      part.before = key;
      part.after = isSame ? part.after : drawing.after;
      lanes = part.after;
      return drawing;
    });
    const widest = Math.max(this.columns, ...drawn.map((one) => one?.columns ?? 1));
    this.step = isNarrow ? 8 : 14;
    if (widest !== this.columns || isForced || !this.box.style.getPropertyValue("--lanes")) {
      this.columns = widest;
      const width = (Math.min(widest, LANES_MAX) + 0.5) * this.step + 6;
      this.box.style.setProperty("--lanes", `${width}px`);
    }
    drawn.forEach((drawing, number) => {
      if (drawing) paint(this.windows[number], drawing, this.step, height);
    });
  }
}

/** Assign a column to each row, and collect the lines between neighbouring rows. */
function place(rows, before, isTop) {
  let lanes = before.map((lane) => lane && { to: lane.to, from: [...lane.from] });
  const lines = []; // [row below, column above, column below]
  const nodes = [];
  let columns = lanes.length;
  const free = () => {
    const found = lanes.findIndex((lane) => lane === null);
    return found < 0 ? lanes.length : found;
  };
  rows.forEach((row, number) => {
    const leads = lanes.flatMap((lane, column) => (lane?.to === row.nid ? [column] : []));
    const column = leads.length ? leads[0] : free();
    lanes.forEach((lane, own) => {
      for (const from of lane?.from ?? []) {
        lines.push([number, from, lane.to === row.nid ? column : own]);
      }
    });
    lanes = lanes.map((lane, own) => (lane && lane.to !== row.nid ? { to: lane.to, from: [own] } : null));
    for (const parent of row.parents) {
      const known = lanes.findIndex((lane) => lane?.to === parent);
      if (known > column && lanes[column] == null) { // its own column is free, and further left
        lanes[column] = { to: parent, from: [...lanes[known].from, column] };
        lanes[known] = null;
      } else if (known >= 0) lanes[known].from.push(column);
      else {
        const own = lanes[column] == null ? column : free();
        while (lanes.length < own) lanes.push(null);
        lanes[own] = { to: parent, from: [column] };
      }
    }
    while (lanes.length && lanes[lanes.length - 1] === null) lanes.pop();
    columns = Math.max(columns, lanes.length, column + 1);
    nodes.push({ column, kind: row.kind, gaps: row.gaps, isCut: leads.length === 0 && !isTop && !row.kind.match(/rejected|soft-failed/) });
  });
  return { lines, nodes, columns, after: lanes };
}

/** Draw a window: lines by colour, then the nodes. */
function paint(part, { lines, nodes }, step, height) {
  part.list.querySelector("svg.lanes")?.remove();
  const x = (column) => 10 + Math.min(column, LANES_MAX - 1) * step;
  const y = (row) => (row + 0.5) * height;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "lanes");
  svg.setAttribute("width", "1");
  svg.setAttribute("height", String(height * part.rows.length));
  svg.setAttribute("aria-hidden", "true");
  const colours = Array.from({ length: COLOURS }, () => []);
  for (const [row, from, to] of lines) {
    const [a, b, top, bottom] = [x(from), x(to), y(row - 1), y(row)];
    const middle = (top + bottom) / 2;
    colours[Math.max(from, to) % COLOURS].push(
      a === b ? `M${a} ${top}V${bottom}` : `M${a} ${top}C${a} ${middle} ${b} ${middle} ${b} ${bottom}`,
    );
  }
  colours.forEach((parts, colour) => { if (parts.length) add(svg, parts.join(""), `c${colour}`); });
  nodes.forEach(({ column, kind, gaps, isCut }, row) => {
    const [a, b] = [x(column), y(row)];
    if (gaps) add(svg, `M${a} ${b}l${step * 0.6} ${height * 0.45}`, "gap");
    if (isCut) add(svg, `M${a} ${b}V${b - height * 0.45}`, "more");
    const full = kind === "event" || kind === "state" ? " full" : "";
    add(svg, SHAPES[kind](a, b), `node c${column % COLOURS}${full}`);
  });
  part.list.prepend(svg);
}

const SHAPES = {
  "event": (a, b) => `M${a - 4} ${b}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z`,
  "state": (a, b) => `M${a} ${b - 6}l6 6l-6 6l-6 -6z`,
  "soft-failed": (a, b) => `M${a - 5} ${b}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z`,
  "rejected": (a, b) => `M${a - 5} ${b - 5}l10 10m0 -10l-10 10`,
};

function add(svg, d, name) {
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", d);
  path.setAttribute("class", name);
  svg.append(path);
}

// The form that jumps ------------------------------------------------------------------------------

const graph = new Graph(document.getElementById("graph"));
const [form, range, at] = ["jump", "at-range", "at"].map((id) => document.getElementById(id));

range.addEventListener("input", () => { at.value = range.value; });
range.addEventListener("change", () => graph.jump(range.value));
at.addEventListener("input", () => { range.value = at.value; });
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (at.value !== "") graph.jump(at.value);
});
document.getElementById("newest").addEventListener("click", () => graph.newest());
