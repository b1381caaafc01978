"""Use in a browser: by keyboard alone, at 400 to 2560 pixels, in the dark, without JavaScript."""

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from storage import Store
from storage.testing import Odd, RoomBuilder, build_room
from tests.inspector.browser import Browser, needs_browser
from tests.inspector.served import Served, served
from tests.inspector.test_resolution import ADMIN, MOD, Fork
from tests.maintenance.rooms import LIVELY, deliver

pytestmark = needs_browser

FOCUSED = "const one = document.activeElement; return one.id || one.dataset.event || one.tagName"


class Rooms(NamedTuple):
    site: Served
    lively: RoomBuilder
    fork: RoomBuilder


@pytest.fixture
async def rooms(store: Store) -> AsyncIterator[Rooms]:
    lively = build_room(
        LIVELY.replaced(fork_rate=0.3, fork_width=4, odd=Odd(rejected=0.05, soft_failed=0.05)),
        250,
        seed=2,
        sign=False,
    )
    await deliver(store, lively.generated())
    fork = Fork()
    fork.left.topic(ADMIN, "first", ts=1_000)
    fork.right.topic(MOD, "second", ts=2_000)
    fork.room.merge(fork.left, fork.right)
    fork.room.message(ADMIN, "both")
    await store.append(fork.room.pdus)
    async with served(store, read_write=True) as site:
        yield Rooms(site, lively, fork.room)


async def test_by_keyboard_alone(rooms: Rooms, browser: Browser) -> None:
    await browser.open(rooms.site.url)
    await browser.press("/")
    assert await browser.run(FOCUSED) == "q"
    await browser.press(*rooms.lively.room_id[:5], "Enter")
    await browser.wait("return location.pathname === '/search'")
    await browser.press("j", "j", "k", "Enter")  # the first one of the results
    await browser.wait("return location.pathname === '/room' && document.querySelector('#graph')")
    await browser.wait("return document.querySelector('#graph[data-ready]')")
    await browser.press("j", "j", "j")
    rows = await browser.values("#graph .row", "event")
    assert await browser.run(FOCUSED) == rows[2]
    await browser.press("k")
    assert await browser.run(FOCUSED) == rows[1]
    await browser.press("Enter")
    await browser.wait("return location.pathname === '/event' && document.getElementById('event')")
    assert await browser.values("#event", "event") == [rows[1]]
    await browser.press("g", "w")
    await browser.wait("return location.pathname === '/growth'")
    await browser.press("g", "o")
    await browser.wait("return location.pathname === '/operations'")
    await browser.press("?")
    assert await browser.run("return document.getElementById('help').open")
    await browser.press("Escape")
    await browser.wait("return !document.getElementById('help').open")
    await browser.press("g", "r")
    await browser.wait("return location.pathname === '/'")
    assert await browser.faults() == []


async def test_tab_reaches_everything_and_shows_where_it_is(rooms: Rooms, browser: Browser) -> None:
    await browser.open(rooms.site.address("/room", id=rooms.fork.room_id))
    wanted = await browser.run(
        "return [...document.querySelectorAll('a, button, input:not([type=hidden])')]"
        ".filter((one) => one.checkVisibility() && !one.closest('.row')).length"
    )
    reached = set()
    for _ in range(wanted + 20):
        await browser.press("Tab")
        html, outline = await browser.run(
            "const one = document.activeElement;"
            "return [one.outerHTML.slice(0, 200), getComputedStyle(one).outlineStyle]"
        )
        reached.add((html, outline))
    assert {outline for html, outline in reached if "<body" not in html} == {"solid"}
    assert any('class="skip"' in html for html, _ in reached)
    assert any('id="graph"' in html for html, _ in reached)


@pytest.mark.parametrize("width", [400, 1280, 2560])
async def test_nothing_overlaps_or_is_cut_off(rooms: Rooms, browser: Browser, width: int) -> None:
    await browser.resize(width)
    merge = rooms.fork.events[-1].event_id
    for path, given in PAGES_AT:
        values = {
            name: value.format(lively=rooms.lively.room_id, fork=rooms.fork.room_id, merge=merge)
            for name, value in given.items()
        }
        await browser.open(rooms.site.address(path, **values))
        assert await browser.faults() == [], path
        assert await browser.run(OVERLAPS) == [], path
    await browser.open(rooms.site.address("/room", id=rooms.lively.room_id))
    await browser.wait("return document.querySelector('#graph[data-ready]')")
    lanes = await browser.run(LANES)
    assert lanes["nodes"] == 100
    assert lanes["widest"] <= lanes["column"]
    assert lanes["off"] < 1  # each node is in the middle of its row


PAGES_AT: tuple[tuple[str, dict[str, str]], ...] = (
    ("/", {"content": "1"}),
    ("/room", {"id": "{lively}", "content": "1"}),
    ("/room/changes", {"id": "{fork}"}),
    ("/room/growth", {"id": "{fork}"}),
    ("/event", {"id": "{merge}", "content": "1"}),
    ("/why", {"event": "{merge}", "reader": ADMIN}),
    ("/state", {"room": "{lively}", "content": "1"}),
    ("/resolution", {"event": "{merge}"}),
    ("/user", {"id": ADMIN, "sync": "1"}),
    ("/growth", {}),
    ("/streams", {}),
    ("/operations", {}),
    ("/explain", {"query": "initial-sync", "user": ADMIN}),
    ("/actions", {}),
)
OVERLAPS = """
const kinds = "p, h1, h2, h3, li, dt, dd, td, th, button, input, label";
const boxes = [...document.querySelectorAll(`main :is(${kinds})`)]
  .filter((one) => one.checkVisibility() && one.getClientRects().length)
  .filter((one) => !one.closest(".row, svg, details, dialog, .scroll"))
  .map((one) => [one, one.getBoundingClientRect()]);
const faults = [];
for (let i = 0; i < boxes.length; i += 1) {
  for (let j = i + 1; j < Math.min(i + 25, boxes.length); j += 1) {
    const [[a, x], [b, y]] = [boxes[i], boxes[j]];
    if (a.contains(b) || b.contains(a)) continue;
    const wide = Math.min(x.right, y.right) - Math.max(x.left, y.left);
    const high = Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top);
    if (wide > 2 && high > 2)
      faults.push(`${a.outerHTML.slice(0, 60)} | ${b.outerHTML.slice(0, 60)}`);
  }
}
return faults.slice(0, 3);
"""
LANES = """
const graph = document.getElementById("graph");
const nodes = [...graph.querySelectorAll(".lanes .node")].slice(0, 100);
const left = graph.getBoundingClientRect().left;
const rows = [...graph.querySelectorAll(".row")];
const middle = (one) => {
  const { top, bottom } = one.getBoundingClientRect();
  return (top + bottom) / 2;
};
return {
  nodes: nodes.length,
  widest: Math.max(...nodes.map((node) => node.getBoundingClientRect().right - left)),
  column: graph.querySelector(".what").getBoundingClientRect().left - left,
  off: Math.max(...nodes.map((node, number) => Math.abs(middle(node) - middle(rows[number])))),
};
"""


async def test_the_graph_has_the_edges_of_the_room(
    store: Store, rooms: Rooms, browser: Browser
) -> None:
    """Each line between two rows leads from an event towards a parent: followed, it ends there."""
    await browser.open(rooms.site.address("/room", id=rooms.lively.room_id))
    await browser.wait("return document.querySelector('#graph[data-ready]')")
    rows = await browser.run(
        "return [...document.querySelectorAll('#graph .row')].map((row) =>"
        " [row.dataset.nid, row.dataset.parents.split(' ')])"
    )
    height = await browser.run(
        "return document.querySelector('#graph .row').getBoundingClientRect().height"
    )
    paths = await browser.run(
        "return [...document.querySelectorAll('.lanes path:not(.node):not(.gap):not(.more)')]"
        ".map((path) => path.getAttribute('d')).join('')"
    )
    nodes = await browser.run(
        "const left = document.querySelector('svg.lanes').getBoundingClientRect().left;"
        "return [...document.querySelectorAll('.lanes .node')].map((node) => {"
        " const box = node.getBoundingClientRect(); return (box.left + box.right) / 2 - left; })"
    )
    steps = lines_of(paths, height)
    drawn = {
        (rows[start][0], rows[end][0])
        for start, x in enumerate(nodes)
        for end in followed(steps, nodes, start, round(x))
    }
    inside = {nid: place for place, (nid, _) in enumerate(rows)}
    expected = {(nid, parent) for nid, parents in rows for parent in parents if parent in inside}
    assert drawn == expected
    assert len([1 for _, parents in rows if len(parents) > 1]) > 3


Steps = dict[tuple[int, int], list[int]]


def lines_of(paths: str, height: float) -> Steps:
    """Return the lines between neighbouring rows: from (row above, x) to the x below."""
    steps: Steps = {}
    for part in paths.split("M")[1:]:
        if "V" in part:
            start, _ = part.split("V")
            x, y = map(float, start.split())
            end = x
        else:
            start, curve = part.split("C")
            x, y = map(float, start.split())
            end = float(curve.split()[-2])
        steps.setdefault((round(y / height - 0.5), round(x)), []).append(round(end))
    return steps


def followed(steps: Steps, nodes: list[float], start: int, x: int) -> set[int]:
    """Return the rows at which the lines from a node end: at the next node on their way."""
    found: set[int] = set()
    todo = [(start, x)]
    while todo:
        row, at = todo.pop()
        for below in steps.get((row, at), []):
            if row + 1 < len(nodes) and round(nodes[row + 1]) == below:
                found.add(row + 1)
            else:
                todo.append((row + 1, below))
    return found


async def test_in_the_dark(rooms: Rooms, browser: Browser) -> None:
    colour = "return getComputedStyle(document.documentElement).backgroundColor"
    await browser.open(rooms.site.url)
    light = await browser.run(colour)
    await browser.dark(is_dark=True)
    try:
        assert await browser.run(colour) != light == "rgb(255, 255, 255)"
    finally:
        await browser.dark(is_dark=False)


IN_SIGHT = """
const graph = document.getElementById("graph"), top = graph.getBoundingClientRect().top + 2;
const row = [...graph.querySelectorAll(".row")].find(
  (one) => one.getBoundingClientRect().bottom > top);
return Number(row.querySelector(".order").textContent) === given[0];
"""
"""The first row that a user can see is at a position. Rows above it may be loaded, out of sight."""


async def test_jumps_and_windows(store: Store, rooms: Rooms, browser: Browser) -> None:
    """The graph jumps to a position, and loads what lies above and below, each event once."""
    await browser.open(rooms.site.address("/room", id=rooms.lively.room_id, at=60))
    await browser.wait(IN_SIGHT, 60)
    await browser.run("document.getElementById('graph').scrollTop = 1")
    await browser.run("document.getElementById('graph').scrollTop = 0")
    await browser.wait("return Number(document.querySelector('#graph .order').textContent) > 60")
    await browser.run(
        "const at = document.getElementById('at'); at.value = 100;"
        "document.querySelector('#jump button').click()"
    )
    await browser.wait(IN_SIGHT, 100)
    await browser.wait(
        "const graph = document.getElementById('graph'); graph.scrollTop += 900;"
        "return graph.dataset.bottom === 'yes' && graph.ariaBusy === 'false'"
    )
    rows = await browser.values("#graph .row", "event")
    assert len(rows) == len(set(rows))
    create = next(event for event in rooms.lively.events if event.type == "m.room.create")
    assert rows[-1] == create.event_id


async def test_a_jump_overtakes_rows_that_are_still_loading(rooms: Rooms, browser: Browser) -> None:
    """The answer to an older request is dropped: the graph has no rows of two positions."""
    await browser.open(rooms.site.address("/room", id=rooms.lively.room_id))
    await browser.wait("return document.querySelector('#graph[data-ready]')")
    await browser.run(HOLD_ROWS)
    await browser.run("document.getElementById('graph').scrollTop = 2000")
    await browser.wait("return window.held !== null")
    await browser.run(
        "document.getElementById('at').value = 40; document.querySelector('#jump button').click()"
    )
    await browser.wait(IN_SIGHT, 40)
    await browser.run("window.held()")
    await browser.wait("return window.released")
    await browser.wait(
        "const graph = document.getElementById('graph'); graph.scrollTop += 900;"
        "return graph.dataset.bottom === 'yes' && graph.ariaBusy === 'false'"
    )
    rows = await browser.values("#graph .row", "event")
    orders = [int(text) for text in await browser.texts("#graph .order")]
    assert len(rows) == len(set(rows))
    assert orders == sorted(orders, reverse=True)
    assert await browser.faults() == []


HOLD_ROWS = """
const real = window.fetch;
window.held = null;
window.fetch = async (address, how) => {
  if (!window.held && !address.searchParams.has("at")) {
    await new Promise((done) => { window.held = done; });
    const answer = await real(address, how);
    setTimeout(() => { window.released = true; });
    return answer;
  }
  return real(address, how);
};
"""
"""The next request for rows waits for a call of `held`."""


async def test_without_javascript(rooms: Rooms) -> None:
    """Every page is made on the server: the list of events can be paged by links."""
    answer = await rooms.site.get("/room", id=rooms.lively.room_id)
    assert len(events_of(answer.text)) == 100
    link = answer.text.split('rel="next" href="')[1].split('"')[0].replace("&amp;", "&")
    older = await rooms.site.send("GET", rooms.site.url + link)
    assert older.status == 200
    assert len(events_of(older.text)) == 100
    assert not set(events_of(answer.text)) & set(events_of(older.text))


def events_of(page: str) -> list[str]:
    return [part.split('"')[0] for part in page.split('data-event="')[1:]]
