"""The inspector on a room of a million events, in a browser: first paint, scrolling, jumps, pages.

The room is a block of events with forks and merges, which is copied inside the table: each copy
continues from the end of the one before. Times are measured in the page, by its own clock. A step
of the graph ends when its rows are there and the browser has painted a frame. Chromium has to be
installed (Debian: chromium, chromium-driver). `STORAGE_BENCH_INSPECTOR` sets the number of events.
"""

import asyncio
import os
import time
from typing import Any, Final, LiteralString

import asyncpg

import storage
from benchmarks.harness import Bench, percentiles, show
from storage import Store
from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.database.placeholders import compose
from storage.ids import RoomId
from storage.testing import SHAPES, build_room
from tests.inspector.browser import Browser, browsing
from tests.inspector.served import Served, served

SERVER: Final = "s1.test"
BLOCK: Final = 2_000
COPIED_AT_ONCE: Final = 50

SQL_BLOCK: Final[LiteralString] = """
CREATE TEMPORARY TABLE block AS
SELECT e.event_nid
FROM events e
WHERE NOT e.outlier AND e.topological_ordering > $1::bigint
"""

SQL_PLAIN: Final[LiteralString] = """
UPDATE events
SET json = $2::bytea
WHERE event_id = $1::text
"""

SQL_COPY: Final[LiteralString] = compose(
    """
INSERT INTO events
SELECT (copy.event).*
FROM (
    SELECT jsonb_populate_record(e, jsonb_build_object(
        'event_nid', e.event_nid + 1000000000::bigint * n,
        'event_id', e.event_id || n,
        'stream_ordering', e.stream_ordering + n * $3::bigint,
        'topological_ordering', e.topological_ordering + n * $4::bigint,
        'prev_distance', NULL, 'auth_distance_1', NULL, 'auth_distance_2', NULL,
        'auth_distance_3', NULL, 'auth_distance_4', NULL,
        'auth_events', :auth_nids.call(e),
        'received_ts', e.received_ts + n,
        'prev_events', (
            SELECT jsonb_agg(CASE
                WHEN EXISTS (SELECT FROM block b WHERE b.event_nid = p.nid)
                    THEN p.nid + 1000000000::bigint * n
                ELSE $5::bigint + 1000000000::bigint * (n - 1)
            END)
            FROM unnest(:prev_nids.call(e)) AS p (nid)
        )
    )) AS event
    FROM block
    JOIN events e USING (event_nid)
    CROSS JOIN generate_series($1::int, $2::int) AS n
    OFFSET 0
) AS copy
""",
    PREV_NIDS,
    AUTH_NIDS,
).sql

SQL_END: Final[LiteralString] = """
UPDATE rooms
SET max_topological_ordering = (SELECT max(topological_ordering) FROM events),
    last_stream_ordering = (SELECT max(stream_ordering) FROM events),
    forward_extremities = ARRAY[$1::bigint]
"""

STEP: Final = """
const [share, done] = arguments;
const graph = document.getElementById("graph"), start = performance.now();
let rest = share * graph.clientHeight;
const scroll = () => {
  const before = graph.scrollTop;
  graph.scrollTop += rest;
  rest -= graph.scrollTop - before;  // something is left where more rows have to be loaded first
};
scroll();
const painted = () => requestAnimationFrame(() => setTimeout(() => {
  const rows = document.elementsFromPoint(
    graph.getBoundingClientRect().left + 60, graph.getBoundingClientRect().top + 40);
  if (Math.abs(rest) < 1 && rows.some((one) => one.classList.contains("row"))) {
    done([performance.now() - start, graph.scrollTop]);
  } else {
    scroll();
    painted();
  }
}));
painted();
"""

JUMP: Final = """
const [position, done] = arguments, start = performance.now();
const at = document.getElementById("at");
at.value = position;
document.querySelector("#jump button").click();
const look = () => {
  const row = document.querySelector("#graph .row .order");
  const svg = document.querySelector("#graph svg.lanes");
  if (row && Number(row.textContent) <= position && Number(row.textContent) > position - 100 && svg)
    requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
  else setTimeout(look, 1);
};
look();
"""

PAINT: Final = """
const [entry] = performance.getEntriesByName("first-contentful-paint");
const [page] = performance.getEntriesByType("navigation");
return entry ? [entry.startTime, page.responseEnd] : null;
"""


async def run(bench: Bench) -> None:
    """Build the room, and measure it."""
    count = int(os.environ.get("STORAGE_BENCH_INSPECTOR", bench.size(1_000_000, 10_000)))
    rounds = bench.size(20, 2)
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        room_id, merge = await _build(store, dsn, count)
        async with served(store) as site:
            with browsing() as browser:
                bench.results = await _measured(site, browser, room_id, rounds)
            bench.results["pages"] = await _pages(site, store, room_id, merge, rounds)
            bench.results["events"] = await _count(dsn)
    bench.write()
    rows = [
        [name, *(values[key] for key in ("p50", "p95", "max"))]
        for name, values in {**bench.results["browser"], **bench.results["pages"]}.items()
    ]
    show("inspector", ["what, ms", "median", "95th", "most"], rows)


async def _build(store: Store, dsn: str, count: int) -> tuple[RoomId, str]:
    """Store one block, and copy it; return the room and one of its merges."""
    room = build_room(
        SHAPES["small_chat"].replaced(fork_rate=0.02), BLOCK, seed=1, sign=False, exact=False
    )
    end = room.message(room.events[0].sender)
    await store.append(room.pdus)
    driver = await asyncpg.connect(dsn, command_timeout=3_600)
    try:
        first, last, stream, nid = await driver.fetchrow(
            "SELECT min(topological_ordering) FILTER (WHERE state_key_nid IS NULL) - 1,"
            " max(topological_ordering), max(stream_ordering),"
            " max(event_nid) FILTER (WHERE event_id = $1) FROM events",
            end.event_id,
        )
        # the stored form of an event cannot be copied to another event id: it has a checksum
        await driver.executemany(SQL_PLAIN, [(one.event_id, one.pdu) for one in room.events])
        await driver.execute(SQL_BLOCK, first)
        await driver.execute("CREATE INDEX ON block (event_nid); ANALYZE block")
        size = await driver.fetchval("SELECT count(*) FROM block")
        copies = max(1, count // size)
        for at in range(1, copies + 1, COPIED_AT_ONCE):
            upto = min(at + COPIED_AT_ONCE - 1, copies)
            await driver.execute(SQL_COPY, at, upto, stream, last - first, nid)
        await driver.execute(SQL_END, nid + 1_000_000_000 * copies)
        await driver.execute("VACUUM ANALYZE")
        merge = next(event for event in room.events[::-1] if len(event.prev_events) > 1)
        return room.room_id, merge.event_id
    finally:
        await driver.close()


async def _count(dsn: str) -> int:
    driver = await asyncpg.connect(dsn)
    try:
        return int(await driver.fetchval("SELECT count(*) FROM events"))
    finally:
        await driver.close()


async def _measured(site: Served, browser: Browser, room_id: RoomId, rounds: int) -> dict[str, Any]:
    """Measure the room in the browser."""
    await browser.resize(1280, 900)
    await browser.open(site.url)  # the process and the browser are warm, as in use
    address = site.address("/room", id=room_id)
    paints, responses = [], []
    for _ in range(rounds):
        await browser.open(address)
        paint, response = await browser.wait(PAINT)
        paints.append(paint)
        responses.append(response)
    await browser.wait("return document.querySelector('#graph[data-ready]')")
    steps = await _steps(browser, 10 * rounds, 0.8)
    fast = await _steps(browser, 10 * rounds, 3)
    back = await _steps(browser, 5 * rounds, -0.8)
    top = int(await browser.run("return document.getElementById('at').max"))
    jumps = [
        await asyncio.to_thread(browser.driver.execute_async_script, JUMP, top * n // rounds + 50)
        for n in range(rounds)
    ]
    deep = await _steps(browser, 5 * rounds, 0.8)
    memory = await browser.run("return document.querySelectorAll('#graph .row').length")
    return {
        "browser": {
            "first paint of the room": percentiles(paints, digits=1),
            "its answer has arrived": percentiles(responses, digits=1),
            "scroll by 0.8 screens": percentiles(steps, digits=1),
            "scroll by 3 screens": percentiles(fast, digits=1),
            "scroll back by 0.8 screens": percentiles(back, digits=1),
            "scroll after a jump": percentiles(deep, digits=1),
            "jump to a position": percentiles(jumps, digits=1),
        },
        "rows_in_document": memory,
    }


async def _steps(browser: Browser, count: int, share: float) -> list[float]:
    """Scroll so many steps of a share of the visible part; return the milliseconds of each."""
    found = [
        await asyncio.to_thread(browser.driver.execute_async_script, STEP, share)
        for _ in range(count)
    ]
    return [float(milliseconds) for milliseconds, _ in found]


async def _pages(
    site: Served, store: Store, room_id: RoomId, merge: str, rounds: int
) -> dict[str, Any]:
    """Measure the answers of pages, as a client of this machine."""
    user = next(iter(await store.member_ids(room_id)))
    pages: dict[str, tuple[str, dict[str, str]]] = {
        "rooms": ("/", {}),
        "rooms by depth": ("/", {"order": "depth"}),
        "room": ("/room", {"id": room_id}),
        "event": ("/event", {"id": merge}),
        "why": ("/why", {"event": merge, "reader": user}),
        "why, never joined": ("/why", {"event": merge, "reader": f"@never:{SERVER}"}),
        "resolution": ("/resolution", {"event": merge}),
        "state": ("/state", {"room": room_id}),
        "growth": ("/growth", {}),
        "growth of the room": ("/room/growth", {"id": room_id}),
        "changes": ("/room/changes", {"id": room_id}),
    }
    results = {}
    for name, (path, given) in pages.items():
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            answer = await site.get(path, **given)
            times.append((time.perf_counter() - start) * 1000)
            if answer.status != 200:
                raise SystemExit(f"{path}: {answer.status}")
        results[f"answer: {name}"] = percentiles(times, digits=1)
    return results
