// Keys, the list of keys, and the news of the rooms on a page. Text is only ever set as text.

const rows = () => [...document.querySelectorAll("main .row, main .item")];
const isTyping = (target) =>
  target.closest("input, textarea, select, [contenteditable]") !== null;

function move(step) {
  const all = rows();
  if (all.length === 0) return;
  const now = all.indexOf(document.activeElement.closest(".row, .item"));
  const next = all[Math.min(Math.max(now + step, 0), all.length - 1)];
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

let isGoing = false;
const PAGES = { h: 0, r: 0, w: 1, s: 2, o: 3, a: 4 };

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  if (document.querySelector("dialog[open]")) return;
  if (isGoing && event.key in PAGES) {
    document.querySelectorAll(".top nav a")[PAGES[event.key]]?.click();
  } else if (event.key === "/") {
    document.getElementById("q").focus();
  } else if (event.key === "?") {
    document.getElementById("help").showModal();
  } else if (event.key === "j" || event.key === "k") {
    move(event.key === "j" ? 1 : -1);
  } else if (event.key === "Enter" && document.activeElement.matches(".row, .item")) {
    document.activeElement.querySelector("a")?.click();
  } else if (event.key !== "g") {
    isGoing = false;
    return;
  }
  isGoing = event.key === "g";
  event.preventDefault();
}

document.addEventListener("keydown", press);
document.getElementById("help-open").addEventListener("click", () => {
  document.getElementById("help").showModal();
});

// News -------------------------------------------------------------------------------------------

const graph = document.getElementById("graph");
const listed = document.querySelectorAll("table#rooms tr[data-room]");
const roomsOfPage = graph ? [graph.dataset.room] : [...listed].map((row) => row.dataset.room);
const banner = document.getElementById("database");
let source = null;
let since = document.body.dataset.since; // a page that was hidden has missed what came after
let wasDown = false;

function show(isUp) {
  banner.hidden = isUp;
  if (isUp && wasDown && graph) document.dispatchEvent(new CustomEvent("back"));
  else if (isUp && wasDown) location.reload();
  wasDown = !isUp;
}

function listen() {
  const address = new URL(document.body.dataset.live, location.href);
  address.searchParams.set("since", since);
  for (const room of roomsOfPage.slice(0, 50)) address.searchParams.append("room", room);
  source = new EventSource(address);
  source.addEventListener("database", (event) => show(JSON.parse(event.data).up));
  source.addEventListener("news", (event) => {
    const { rooms } = JSON.parse(event.data);
    since = event.lastEventId;
    for (const row of listed) row.classList.toggle("fresh", rooms.includes(row.dataset.room) || row.classList.contains("fresh"));
    document.dispatchEvent(new CustomEvent("news", { detail: rooms }));
  });
  source.addEventListener("open", () => { document.body.dataset.listening = "yes"; });
}

// A browser opens few connections to one host, so a page that nobody sees closes its own.
function attend() {
  if (document.hidden) {
    source?.close();
    source = null;
  } else if (source === null && roomsOfPage.length > 0) {
    listen();
  }
}

document.addEventListener("visibilitychange", attend);
attend();
