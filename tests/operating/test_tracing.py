"""Spans, as the in-memory exporter of OpenTelemetry's SDK gets them."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import storage
from storage import InputError, Store, UnknownRoom
from storage.observability import opentelemetry
from storage.observability.opentelemetry import IDS_MAX
from storage.testing import RoomBuilder, build_room
from tests.maintenance.rooms import LIVELY, SERVER

ALICE, BOB = "@alice:s1.test", "@bob:s1.test"
SECRET = "the key hangs behind the door"


@pytest.fixture
def provider() -> TracerProvider:
    return TracerProvider()


@pytest.fixture
def spans(provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    opentelemetry.enable(provider)
    yield exporter
    opentelemetry.disable()


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


def small_room() -> RoomBuilder:
    room = RoomBuilder("11", sign=False)
    room.start(ALICE)
    room.join(BOB)
    return room


def taken(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Those that have ended since the last time, by name; of several the last."""
    found = {span.name: span for span in spans.get_finished_spans()}
    spans.clear()
    return found


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_calls_name_rooms_and_events(store: Store, spans: InMemorySpanExporter) -> None:
    room = small_room()
    await store.append(room.pdus)
    ids = tuple(event.event_id for event in room.events)
    found = taken(spans)
    assert set(found) == {"storage.append", "storage.commit"}
    assert attributes(found["storage.append"]) == {
        "matrix.room_ids": (room.room_id,),
        "matrix.event_ids": ids,
    }
    assert attributes(found["storage.commit"]) == {
        "matrix.room_ids": (room.room_id,),
        "matrix.event_ids": ids,
        "storage.events": len(ids),
    }
    first = await store.sync(ALICE)
    await store.sync(ALICE, since=first.next_batch, timeout_ms=1)
    await store.messages(room.room_id, ALICE)
    await store.backfill(room.room_id, [ids[-1]], 5)
    # Tracing must not consume an iterator.
    await store.backfill(room.room_id, (one for one in ids), 5)
    await store.context(ids[-1], ALICE)
    await store.states_before([ids[-1], ids[-2]])
    found = taken(spans)
    assert attributes(found["storage.sync"]) == {}
    assert attributes(found["storage.messages"]) == {"matrix.room_ids": (room.room_id,)}
    assert attributes(found["storage.backfill"]) == {"matrix.room_ids": (room.room_id,)}
    assert attributes(found["storage.context"]) == {"matrix.event_ids": (ids[-1],)}
    assert attributes(found["storage.state"]) == {"matrix.event_ids": (ids[-1], ids[-2])}


async def test_a_write_is_linked_to_all_its_appends(
    store: Store, spans: InMemorySpanExporter, provider: TracerProvider
) -> None:
    """The span has no parent, whatever span was open at open().

    Spans of calls are children of their caller's span.
    """
    room = small_room()
    await store.append(room.pdus)
    spans.clear()
    with provider.get_tracer("homeserver").start_as_current_span("PUT /send") as outer:
        await asyncio.gather(*(store.append([room.message(BOB).pdu]) for _ in range(4)))
    finished = spans.get_finished_spans()
    appends = [span for span in finished if span.name == "storage.append"]
    commits = [span for span in finished if span.name == "storage.commit"]
    assert [span.parent for span in appends] == [outer.get_span_context()] * 4
    assert [span.parent for span in commits] == [None] * len(commits)
    linked = {link.context.span_id for commit in commits for link in commit.links}
    assert linked == {span.context.span_id for span in appends if span.context is not None}
    assert len(commits) < 4


async def test_errors_give_their_class_only(store: Store, spans: InMemorySpanExporter) -> None:
    with pytest.raises(UnknownRoom):
        await store.messages("!nowhere:s1.test", ALICE)
    span = taken(spans)["storage.messages"]
    assert attributes(span) == {
        "matrix.room_ids": ("!nowhere:s1.test",),
        "error.type": "UnknownRoom",
    }
    assert (span.status.is_ok, span.status.description, span.events) == (False, "UnknownRoom", ())


async def test_nobody_is_named_and_nothing_told(store: Store, spans: InMemorySpanExporter) -> None:
    room = build_room(LIVELY, 60, seed=3, sign=False)
    room.message(next(iter(sorted(room.state.values()))) and room.events[0].sender, SECRET)
    await store.append(room.pdus)
    await store.sync(room.events[0].sender)
    await store.messages(room.room_id, room.events[0].sender, limit=100)
    told = "".join(span.to_json() for span in spans.get_finished_spans())
    assert room.room_id in told
    assert SECRET not in told
    assert not any(f'"{event.sender}"' in told for event in room.events)
    assert all(
        len(value) <= IDS_MAX
        for span in spans.get_finished_spans()
        for value in attributes(span).values()
        if isinstance(value, tuple)
    )


async def test_there_are_none_before_somebody_wants_them(
    store: Store, provider: TracerProvider
) -> None:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    await store.append(small_room().pdus)
    opentelemetry.enable(provider)
    opentelemetry.disable()
    await store.sync(ALICE)
    assert exporter.get_finished_spans() == ()


def test_without_the_package_everything_else_works() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import storage\n"
        "from storage import InputError\nfrom storage.observability import opentelemetry\n"
        "try:\n    opentelemetry.enable()\nexcept InputError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "pip install 'room-storage[tracing]'" in done.stdout
    assert InputError.__name__
