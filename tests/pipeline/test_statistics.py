"""Statistics equal a naive count over the deliveries; the page has the same figures.

Names in it stay text.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import pytest
from pyspark.sql import SparkSession

import storage
from storage.database import Database
from storage.errors import InputError
from storage.maintenance.totals import counts, largest_states
from storage.pipeline import statistics
from storage.pipeline.source.filters import Options
from storage.pipeline.source.reader import EventReader, ReadRange
from storage.pipeline.stats import aggregate
from storage.pipeline.stats.html import text
from storage.testing import (
    ODD_SOME,
    SHAPES,
    RoomBuilder,
    build_room,
    deliver_with_gap,
    generate_room,
)
from tests.cli.running import room_storage
from tests.long_run import long_run
from tests.pipeline.java import COMMAND
from tests.pipeline.stores import SERVER
from tests.stored_bytes import forms_of

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]
ALICE = "@alice:s1.test"
HOSTILE_TYPE = "<script>alert(1)</script>$\\frac\x01&amp;\"'"
HOSTILE_NAME = "</td><img src=x onerror=alert(2)>\U0001f600$_{x}"
YEAR_9999_MS = 253_370_764_800_000
HELD = {"stored", "rejected", "soft_failed", "redacted"}


class CountedEvent(NamedTuple):
    """What the dumb count knows of an event."""

    room_id: str
    type: str
    day: str | None
    size: int
    """Of its stored form."""
    is_state: bool
    origin: str
    parents: int


def hostile_room() -> RoomBuilder:
    room = RoomBuilder("11")
    room.start(ALICE, name=HOSTILE_NAME)
    room.send(ALICE, HOSTILE_TYPE, {"body": "x"})
    room.message(ALICE, "from the future", ts=YEAR_9999_MS)
    return room


async def stored(dsn: str) -> dict[str, CountedEvent]:
    """Four rooms, event by event; what is held of them."""
    odd = generate_room(SHAPES["small_chat"].replaced(odd=ODD_SOME), 60, seed=3, sign=False)
    gap = deliver_with_gap(
        build_room(SHAPES["fork_heavy"], 50, seed=4, version="12", sign=False), 15, 30
    )
    forks = generate_room(SHAPES["fork_heavy"], 40, seed=5, sign=False)
    held: dict[str, CountedEvent] = {}
    async with storage.open(dsn, server_name=SERVER) as store:
        for event in (
            one for room in (odd, gap, forks, hostile_room().generated()) for one in room
        ):
            given = {} if event.state_before is None else {event.event_id: event.state_before}
            [result] = await store.append(
                [event.pdu],
                room_version=event.room_version,
                origin=event.origin,
                state_before=given,
            )
            if result.outcome in HELD:
                held[event.event_id] = told(event.room_id, event.origin, event.pdu)
        async with store.database.connection() as conn:
            forms = await forms_of(conn._driver)
    return {event_id: one._replace(size=len(forms[event_id])) for event_id, one in held.items()}


def told(room_id: str, origin: str, raw: bytes) -> CountedEvent:
    pdu = json.loads(raw)
    day = datetime.fromtimestamp(pdu["origin_server_ts"] / 1000, UTC).date()
    parents = 0 if origin == "outlier" else len(pdu["prev_events"])
    return CountedEvent(
        room_id,
        pdu["type"],
        None if day.year == 9999 else str(day),
        0,
        "state_key" in pdu,
        origin,
        parents,
    )


def counted(held: Iterable[CountedEvent], by: str) -> dict[Any, tuple[int, int]]:
    """Events and bytes."""
    events, sizes = Counter[Any](), Counter[Any]()
    for one in held:
        events[getattr(one, by)] += 1
        sizes[getattr(one, by)] += one.size
    return {key: (events[key], sizes[key]) for key in events}


async def test_the_numbers_are_those_of_a_dumb_count(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    held = await stored(dsn)
    stages: list[str] = []
    tmp_path /= "to [here]"
    found = statistics(spark, dsn, str(tmp_path), top=3, partitions=3, stage=stages.append)
    assert stages == ["counting", "adding up", "drawing"]
    async with await Database.open(dsn) as database, database.connection() as conn:
        again, states = (
            await counts(conn),
            {row.room_id: row for row in await largest_states(conn, 100)},
        )
    totals = dict(found.totals)
    assert {name: totals[name] for name in again._fields if name in totals} == {
        name: value for name, value in again._asdict().items() if name in totals
    }
    assert (totals["events"], totals["bytes"], totals["rooms"]) == (
        len(held),
        sum(one.size for one in held.values()),
        4,
    )
    assert totals["state_events"] == sum(one.is_state for one in held.values())
    assert totals["outliers"] == sum(one.origin == "outlier" for one in held.values())
    assert totals["backfilled"] == sum(one.origin == "backfill" for one in held.values())
    assert totals["merges"] == sum(one.parents > 1 for one in held.values()) > 0

    def table(name: str) -> list[Any]:
        return spark.read.parquet(
            str(tmp_path).replace("[", "\\[").replace("]", "\\]") + "/" + name
        ).collect()

    assert {row.type: (row.events, row.bytes) for row in table("types")} == counted(
        held.values(), "type"
    )
    rooms = {row.room_id: row for row in table("rooms")}
    assert {room_id: (row.events, row.bytes) for room_id, row in rooms.items()} == counted(
        held.values(), "room_id"
    )
    merges = Counter(one.room_id for one in held.values() if one.parents > 1)
    assert {room_id: row.merges for room_id, row in rooms.items() if row.merges} == merges
    assert {room_id: (row.state_entries, row.joined) for room_id, row in rooms.items()} == {
        room_id: (row.state_entries, row.joined) for room_id, row in states.items()
    }
    days = {row.day and str(row.day): row for row in table("days")}
    assert {
        day: (row.sent_events, row.sent_bytes) for day, row in days.items() if row.sent_events
    } == counted(held.values(), "day")
    assert days[None].sent_events == 1, "a day that the sender has made up is none"
    assert sum(row.received_events for row in days.values()) == len(held)
    assert [row.received_events for row in table("months") if row.received_events] == [len(held)]
    assert sum(row.events for row in table("counts")) == len(held)
    assert found.most_forked[0]["room_id"] == max(
        merges, key=lambda room_id: (merges[room_id], room_id)
    )
    assert [row["state_entries"] for row in found.largest_states] == sorted(
        (row.state_entries for row in rooms.values()), reverse=True
    )[:3]
    check_page((tmp_path / "index.html").read_text(encoding="utf-8"), found)


def check_page(page: str, found: aggregate.Statistics) -> None:
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert {one.tag for one in root.iter()} <= {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "h1",
            "h2",
            "section",
            "p",
            "table",
            "tr",
            "th",
            "td",
            "img",
        ),
    }
    cells = [cell.text for cell in root.iter("td")]
    numbers = [
        *found.totals.values(),
        *(row["events"] for row in found.types),
        *(row["bytes"] for row in found.largest_rooms),
    ]
    assert [number for number in numbers if f"{number:,}" not in cells] == []
    assert [row["room_id"] for row in found.largest_rooms if row["room_id"] not in cells] == []
    pictures = list(root.iter("img"))
    assert len(pictures) == 6
    for picture in pictures:
        source = picture.attrib["src"].removeprefix("data:image/svg+xml;base64,")
        image = base64.b64decode(source, validate=True)
        assert {one.partition(b'"')[0] for one in image.split(b"http")[1:]} == {
            b"://www.w3.org/2000/svg",
            b"://www.w3.org/1999/xlink",
        }
        drawn = ET.fromstring(image)
        assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    addresses = [
        value for one in root.iter() for key, value in one.attrib.items() if key in {"src", "href"}
    ]
    assert all(value.startswith("data:") for value in addresses)
    assert "url(" not in page
    assert "@import" not in page


async def test_what_others_have_named_stays_text(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(hostile_room().pdus)
    found = statistics(spark, dsn, str(tmp_path), partitions=1)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<img src=x" not in page
    cells = [cell.text for cell in ET.fromstring(page.removeprefix("<!DOCTYPE html>\n")).iter("td")]
    assert HOSTILE_NAME in cells
    assert HOSTILE_TYPE.replace("\x01", "\N{REPLACEMENT CHARACTER}") in cells
    assert [row["type"] for row in found.types if "script" in row["type"]] == [HOSTILE_TYPE]
    assert found.most_forked == []


async def test_what_is_written_meanwhile_is_not_counted(dsn: str) -> None:
    """Another writer has allocated the numbers behind.

    What the first writer stores later lies within the range that is scanned.
    """
    early, late, other = (
        generate_room(SHAPES["direct_chat"], 8, seed=seed, sign=False) for seed in (1, 2, 3)
    )
    async with (
        storage.open(dsn, server_name=SERVER, instance_name="first") as first,
        storage.open(dsn, server_name=SERVER, instance_name="second") as second,
    ):
        await first.append([event.pdu for event in early])
        await second.append([event.pdu for event in other])
        stretches = EventReader(Options(dsn, partitions=2)).partitions()
        await first.append([event.pdu for event in late])
        async with first.database.connection() as conn:
            assert (await counts(conn)).events == 24
    rows = [
        row
        for stretch in stretches
        if isinstance(stretch, ReadRange)
        for batch in aggregate.counts_of(dsn, stretch)
        for row in batch.to_pylist()
    ]
    assert {row["room_id"] for row in rows} == {early.room_id, other.room_id}
    assert sum(row["events"] for row in rows) == 16


def test_a_text_is_cut_to_a_length_before_it_is_escaped() -> None:
    assert text("<" * 500) == "&lt;" * 119 + "…"
    assert text("\x00\ud800\ufffe") == "\N{REPLACEMENT CHARACTER}" * 3
    assert (text(None), text(1234567), text("'\"")) == ("", "1,234,567", "&#x27;&quot;")


@long_run
async def test_the_command(dsn: str, tmp_path: Path) -> None:
    room = generate_room(SHAPES["direct_chat"], 20, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append([event.pdu for event in room])
    settings = ("--master", "local[1]", *COMMAND)
    done = room_storage("spark", "statistics", str(tmp_path), "--dsn", dsn, "--json", *settings)
    assert (done.returncode, "counting …" in done.stderr) == (0, True), done.stderr
    document = json.loads(done.stdout)
    assert document["totals"]["events"] == 20
    assert (tmp_path / "index.html").exists()


def test_without_the_plotting_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aggregate, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"room-storage\[spark\]"):
        aggregate.check_plots()


def test_a_database_without_any_event(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no store was ever opened"):
        statistics(spark, dsn, str(tmp_path))
