"""Visibility: its size in a very large room, its cost for a write, and its cost for a page.

Pages have 100 events of a room under "joined", in which events before a user's join are hidden. Two
variants of the statement run in turn with it: without any filter, and with the filter but without
the topological ranges that have visible events.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import storage
from benchmarks.harness import Bench, show, spent, spread
from benchmarks.visible_room import (
    ABSENT,
    ADMIN,
    ROOM_ID,
    SERVER,
    VisibleRoomHistory,
    append_all,
    built,
    copy,
)
from storage.database.connection import Connection
from storage.persist.model.change_set import ChangeSet
from storage.persist.plan import audience
from storage.queries import messages
from storage.queries.events import stored_of
from storage.queries.filters import ANY_EVENT
from storage.queries.messages import PageRow
from storage.streams.positions import LARGEST_POSITION
from storage.testing import RoomBuilder

PAGE: Final = 100
FULL: Final = VisibleRoomHistory(events=1_000_000, local=10_000, remote=50_000, servers=2_000)
QUICK: Final = VisibleRoomHistory(events=20_000, local=200, remote=1_000, servers=40)
SMALL: Final = VisibleRoomHistory(events=600, local=20, remote=40, servers=10)

FILTER: Final = """AND user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences,
    r.world_audiences, r.shared_before, r.reader_nid, r.unread)"""
RANGES: Final = """topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
    $3::bigint, $9::bigint + 1, 0)"""
EVERYWHERE: Final = """(
    SELECT 0::bigint AS lowest, 9223372036854775807 AS highest, s.*
    FROM visibility_of(r.room_nid, r.principal_nid) AS s
)"""
NOTHING: Final = "(SELECT 0::bigint AS lowest, 9223372036854775807 AS highest)"
WITHHELD: Final = """NOT was_there(e, r.joined_since, r.joined_audiences)
    AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
    AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld"""

SQL_SIZES: Final = """
SELECT relname AS name, pg_relation_size(oid) AS heap, pg_indexes_size(oid) AS indexes,
    reltuples::bigint AS rows
FROM pg_class WHERE relname IN ('visibility', 'audiences') ORDER BY 1
"""
SQL_TABLES: Final = """
SELECT p.name, v.audiences::text AS audiences, v.last_join_topological, v.joined_count
FROM visibility v JOIN principals p USING (principal_nid) WHERE v.audiences <> '{}' ORDER BY 1
"""
SQL_NUMBERS: Final = (
    "SELECT audience, branches, continued, opened_topological FROM audiences ORDER BY 1"
)


class VisibilitySizeRow(NamedTuple):
    """A table's bytes and rows."""

    name: str
    heap: int
    indexes: int
    rows: int


class PrincipalRangesRow(NamedTuple):
    """The visible ranges of a principal."""

    name: str
    audiences: str
    last_join_topological: int | None
    joined_count: int


class AudienceRangeRow(NamedTuple):
    """An audience."""

    audience: int
    branches: int
    continued: bool
    opened_topological: int | None


def without(sql: str, *parts: tuple[str, str]) -> str:
    """Replace parts of a statement, each of which must be there; white space may differ."""
    for old, new in parts:
        pattern = r"\s+".join(map(re.escape, old.split()))
        sql, count = re.subn(pattern, lambda _, new=new: new, sql)  # type: ignore[misc]
        if not count:
            raise ValueError(f"the statement has changed: no {old!r} in it")
    return sql


PLAIN: Final = without(messages.SQL_BACKWARDS, (RANGES, EVERYWHERE))
UNFILTERED: Final = without(
    messages.SQL_BACKWARDS, (RANGES, NOTHING), (FILTER, ""), (WITHHELD, "false AS withheld")
)


async def run(bench: Bench) -> None:
    """Measure all of it."""
    history = QUICK if bench.quick else FULL
    await _agree(bench)
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name=SERVER) as store,
        store.database.connection() as conn,
    ):
        sheet = await copy(conn, history)
        bench.results["size"] = await _sizes(conn, history)
        bench.results["size"]["rows written per membership change"] = round(
            sheet.written / sum(happening.action != "message" for happening in history), 2
        )
        bench.results["pages"] = await _pages(conn, history, rounds=bench.size(200, 30))
        bench.results["pages"]["cpu ms"] = await _pages_cpu(bench, conn, history)
        bench.results["plan of a page across what is hidden"] = await _plan(conn, history)
    bench.results["growth"] = [await _grown(bench, history) for history in _growth(bench)]
    bench.results["rows written"] = await _rows_written(bench)
    bench.results["persist"] = await _persist(bench)
    bench.write()
    _show(bench)


async def _agree(bench: Bench) -> None:
    """Check that the computed room equals the room whose events are appended."""
    found = []
    for build in (True, False):
        async with (
            bench.database() as dsn,
            storage.open(dsn, server_name=SERVER) as store,
            store.database.connection() as conn,
        ):
            if build:
                await copy(conn, SMALL)
            else:
                await append_all(store, built(SMALL))
            found.append(
                (
                    await conn.fetch(SQL_TABLES, row=PrincipalRangesRow),
                    await conn.fetch(SQL_NUMBERS, row=AudienceRangeRow),
                )
            )
    if found[0] != found[1]:
        raise AssertionError("the computed room differs from the appended one")


async def _sizes(conn: Connection, history: VisibleRoomHistory) -> dict[str, Any]:
    rows = await conn.fetch(SQL_SIZES, row=VisibilitySizeRow)
    total = sum(row.heap + row.indexes for row in rows)
    principals = history.local + history.servers
    return {
        "tables": [row._asdict() for row in rows],
        "principals": principals,
        "MB": round(total / 1e6, 2),
        "MB per 10,000 principals": round(total / 1e6 / principals * 10_000, 2),
    }


class VisibilityQuery(NamedTuple):
    """A statement, its reader, and the topological position at which it begins."""

    sql: str
    user: str
    top: int


def _questions(history: VisibleRoomHistory) -> dict[str, VisibilityQuery]:
    """Return the pages to compare.

    The absent user came back at 1/400 before the end; 50 events after that a page goes back across
    the gap.
    """
    across = history.events - history.events // 400 + 50
    return {
        "ordinary, unfiltered": VisibilityQuery(UNFILTERED, ADMIN, across),
        "ordinary, plain filter": VisibilityQuery(PLAIN, ADMIN, across),
        "ordinary": VisibilityQuery(messages.SQL_BACKWARDS, ADMIN, across),
        "across what is hidden": VisibilityQuery(messages.SQL_BACKWARDS, ABSENT, across),
    }


def _arguments(asked: VisibilityQuery) -> tuple[object, ...]:
    return (
        ROOM_ID,
        asked.user,
        asked.top,
        LARGEST_POSITION,
        LARGEST_POSITION,
        0,
        0,
        LARGEST_POSITION,
        PAGE,
        [],
        *ANY_EVENT.arguments,
        0,
        0,
        LARGEST_POSITION,
    )


async def _pages(conn: Connection, history: VisibleRoomHistory, rounds: int) -> dict[str, Any]:
    """Return milliseconds of each page, queried in turn."""
    questions = _questions(history)
    plain = VisibilityQuery(PLAIN, ABSENT, questions["ordinary"].top)
    times: dict[str, list[float]] = {name: [] for name in questions}
    answers: dict[str, list[int | None]] = {}
    for _ in range(rounds):
        for name, asked in questions.items():
            begun = time.perf_counter()
            rows = await conn.fetch(asked.sql, *_arguments(asked), row=PageRow)
            events = [stored_of(row[messages.EVENT :]) for row in rows]  # as `messages` does
            times[name].append((time.perf_counter() - begun) * 1000)
            assert len(events) == PAGE + 1
            answers[name] = [row.event_nid for row in rows]
    begun = time.perf_counter()
    scanned = [
        row.event_nid for row in await conn.fetch(plain.sql, *_arguments(plain), row=PageRow)
    ]
    scan_ms = (time.perf_counter() - begun) * 1000
    if scanned != answers["across what is hidden"] or len(scanned) != PAGE + 1:
        raise AssertionError("the page by ranges differs from the page by the filter alone")
    figures = {
        name: spread(one, digits=3) | {"p10": percentile(one, 0.1)} for name, one in times.items()
    }
    return {
        "ms": figures,
        "across what is hidden, plain filter, ms": round(scan_ms, 1),
        "filter": round(figures["ordinary"]["p10"] / figures["ordinary, unfiltered"]["p10"], 3),
        "across / ordinary": round(
            figures["across what is hidden"]["p10"] / figures["ordinary"]["p10"], 3
        ),
    }


async def _pages_cpu(
    bench: Bench, conn: Connection, history: VisibleRoomHistory
) -> dict[str, float]:
    """Return CPU milliseconds of a page on both sides, and the ratio; load matters little."""
    totals = dict.fromkeys(questions := _questions(history), 0.0)
    together, blocks = bench.size(50, 5), bench.size(10, 2)
    for _ in range(blocks):
        for name, asked in questions.items():
            with spent(bench.server) as used:
                for _ in range(together):
                    rows = await conn.fetch(asked.sql, *_arguments(asked), row=PageRow)
                    assert len([stored_of(row[messages.EVENT :]) for row in rows]) == PAGE + 1
            totals[name] += used.python + used.backends
    found = {name: round(total * 1000 / (together * blocks), 3) for name, total in totals.items()}
    return found | {"ratio": round(totals["ordinary"] / (totals["ordinary, unfiltered"] or 1), 3)}


def _growth(bench: Bench) -> list[VisibleRoomHistory]:
    """Return histories with more members, then with as many more changes."""
    small = VisibleRoomHistory(
        events=bench.size(20_000, 2_000),
        local=bench.size(500, 50),
        remote=bench.size(2_000, 200),
        servers=bench.size(100, 10),
    )
    large = replace(
        small,
        events=small.events * 4,
        local=small.local * 4,
        remote=small.remote * 4,
        servers=small.servers * 4,
    )
    return [
        small,
        large,
        replace(large, churn=1.0),
        replace(large, churn=0.5, events=large.events * 4),
    ]


async def _grown(bench: Bench, history: VisibleRoomHistory) -> dict[str, Any]:
    """Return the size of the tables for a history."""
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name=SERVER) as store,
        store.database.connection() as conn,
    ):
        sheet = await copy(conn, history)
        sizes = await _sizes(conn, history)
        changes = sum(happening.action != "message" for happening in history)
        return {
            "principals": sizes["principals"],
            "events": history.events,
            "changes of membership": changes,
            "MB per 10,000 principals": sizes["MB per 10,000 principals"],
            "rows per change": round(sheet.written / changes, 2),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile; ratios use the first tenth, because other load only adds."""
    return round(sorted(values)[int(len(values) * share)], 3)


async def _plan(conn: Connection, history: VisibleRoomHistory) -> list[str]:
    asked = _questions(history)["across what is hidden"]
    return await conn.fetchvals(
        "EXPLAIN (ANALYZE, TIMING OFF, SUMMARY OFF, BUFFERS OFF) " + asked.sql, *_arguments(asked)
    )


async def _rows_written(bench: Bench) -> dict[str, int]:
    """Return the rows of visibility and audiences that single events write."""
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        room = RoomBuilder("11", sign=False)
        room.start(ADMIN, history_visibility="shared")
        for number in range(bench.size(500, 50)):
            room.join(f"@u{number}:{SERVER}")
        await store.append(room.pdus, room_version="11")
        found: dict[str, int] = {}
        steps = {
            "message": room.message(ADMIN),
            "join": room.join(f"@new:{SERVER}"),
            "leave": room.leave(f"@new:{SERVER}"),
            "visibility for everybody": room.history_visibility(ADMIN, "world_readable"),
            "visibility back": room.history_visibility(ADMIN, "joined"),
        }
        for name, event in steps.items():
            with _watched() as counted:
                await store.append([event.pdu], room_version="11")
            found[name] = len(counted)
        return found


@contextmanager
def _watched() -> Iterator[list[tuple[int, int]]]:
    """Record the keys of the visibility rows that writes contain."""
    keys: list[tuple[int, int]] = []
    kept = {name: getattr(ChangeSet, name) for name in ("set_visibility", "set_audience")}

    def watched(name: str) -> Callable[[ChangeSet, tuple[int, int], Any], None]:
        def keep(change_set: ChangeSet, key: tuple[int, int], row: Any) -> None:
            keys.append(key)
            kept[name](change_set, key, row)

        return keep

    for name in kept:
        setattr(ChangeSet, name, watched(name))
    try:
        yield keys
    finally:
        for name, function in kept.items():
            setattr(ChangeSet, name, function)


async def _persist(bench: Bench) -> dict[str, Any]:
    """Return microseconds per event with and without writing visibility, in turn."""
    history = VisibleRoomHistory(
        events=bench.size(4_000, 400),
        local=bench.size(300, 30),
        remote=bench.size(300, 30),
        servers=20,
    )
    times: dict[str, list[float]] = {"with": [], "without": []}
    cpu: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(bench.size(5, 2)):
        for name, kept in times.items():
            async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
                with _unkept() if name == "without" else _kept():
                    pdus = built(history)
                    with spent(bench.server) as used:
                        await append_all(store, pdus)
                    kept.append(used.clock / history.events * 1e6)
                    cpu[name].append((used.python + used.backends) / history.events * 1e6)
    figures = {name: spread(one) for name, one in times.items()}
    used_figures = {name: spread(one) for name, one in cpu.items()}
    return {
        "us per event": figures,
        "cpu us per event": used_figures,
        "changes of membership per 100 events": round(
            100 * sum(one.action != "message" for one in history) / history.events, 1
        ),
        "ratio": round(figures["with"]["min"] / figures["without"]["min"], 3),
        "cpu ratio": round(used_figures["with"]["min"] / used_figures["without"]["min"], 3),
    }


@contextmanager
def _kept() -> Iterator[None]:
    yield


@contextmanager
def _unkept() -> Iterator[None]:
    """Skip audiences: every event gets the number 0."""
    names = ("advance", "branch", "of_event", "note_join", "note_out_of_range")
    kept = {name: getattr(audience, name) for name in names}

    def advance(step: Any, target: Any) -> None:
        step.main = target.state_group

    replacements = (advance, lambda *_: 0, lambda *_: 0, lambda *_: None, lambda *_: None)
    for name, replacement in zip(names, replacements, strict=True):
        setattr(audience, name, replacement)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(audience, name, function)


def _show(bench: Bench) -> None:
    pages, size, persist = bench.results["pages"], bench.results["size"], bench.results["persist"]
    rows: Sequence[Sequence[object]] = [
        *(
            [f"page, {name}: ms", one["p10"], one["median"], one["max"]]
            for name, one in pages["ms"].items()
        ),
        ["page, filter / unfiltered", pages["filter"], "", ""],
        ["page, filter / unfiltered, by CPU time", pages["cpu ms"]["ratio"], "", ""],
        ["page, across / ordinary", pages["across / ordinary"], "", ""],
        [
            "page, across, plain filter: ms",
            pages["across what is hidden, plain filter, ms"],
            "",
            "",
        ],
        ["MB per 10,000 principals", size["MB per 10,000 principals"], "", ""],
        *(
            [f"rows written by a {name}", count, "", ""]
            for name, count in bench.results["rows written"].items()
        ),
        *(
            [
                (
                    f"MB per 10,000 principals: {one['principals']} of them,"
                    f" {one['changes of membership']} changes"
                ),
                one["MB per 10,000 principals"],
                "",
                "",
            ]
            for one in bench.results["growth"]
        ),
        *(
            [f"persist {name}: cpu us an event", one["min"], one["median"], one["max"]]
            for name, one in persist["cpu us per event"].items()
        ),
        ["persist, with / without, by CPU time", persist["cpu ratio"], "", ""],
    ]
    show("visibility", ["", "", "median", "max"], rows)
