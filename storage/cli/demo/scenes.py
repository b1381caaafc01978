"""Results of the store, one table each."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Final

from storage.cli.demo.rooms import DemoRoom
from storage.cli.demo.story import ALICE, BOB, CAROL, DAVE, MALLORY, NAMES, DemoStory
from storage.cli.demo.teller import TablePrinter
from storage.cli.import_files import OUTCOMES
from storage.ids import EventId, RoomId, StateKey
from storage.importing import Summary
from storage.queries.events import StoredEvent
from storage.queries.sync.types import Sync
from storage.store.facade import Store

ROOMS_SHOWN: Final = 5
REMOTE: Final = "s3.test"
STATE_KEYS: Final[tuple[StateKey, ...]] = (
    ("m.room.topic", ""),
    ("m.room.history_visibility", ""),
    *(("m.room.member", user) for user in (ALICE, CAROL, MALLORY, BOB, DAVE)),
)


def name(user_id: str) -> str:
    """Return a user's name in the story."""
    return NAMES.get(user_id, user_id)


def said(event: StoredEvent) -> str:
    """Describe an event in a few words."""
    content = event.content
    match event.type:
        case "m.room.message":
            return str(content.get("body", "(redacted)"))
        case "m.room.member":
            whom = "" if event.state_key == event.sender else f" {name(event.state_key or '')}"
            return f"{content.get('membership')}{whom}"
        case "m.room.topic" | "m.room.name":
            return f"{event.type[7:]}: {content.get(event.type[7:], '(redacted)')}"
        case "m.room.history_visibility":
            return f"history visibility: {content.get('history_visibility')}"
        case _:
            return event.type


def rooms(teller: TablePrinter, made: list[DemoRoom]) -> None:
    """Show the rooms to store."""
    rows = []
    for one in made:
        parsed = [json.loads(event.pdu) for event in one.room]
        kinds = Counter(pdu["type"] for pdu in parsed)
        bans = sum(
            pdu["type"] == "m.room.member" and pdu["content"].get("membership") == "ban"
            for pdu in parsed
        )
        merges = sum(len(pdu["prev_events"]) > 1 for pdu in parsed)
        counts = (
            len(parsed),
            merges,
            kinds["m.room.member"],
            bans,
            kinds["m.room.history_visibility"],
            kinds["m.room.redaction"],
        )
        rows.append((one.room.room_id, one.what, one.room.room_version, *counts))
    columns = [
        "room",
        "what",
        "version",
        "PDUs",
        "merges",
        "members",
        "bans",
        "visibility",
        "redactions",
    ]
    teller.table("Rooms", "Signed by the servers of their users; made from a seed.", columns, rows)


def imported(teller: TablePrinter, summary: Summary, seconds: float) -> None:
    """Show the results of the import."""
    rows = [
        (outcome, summary.outcomes[outcome]) for outcome in OUTCOMES if summary.outcomes[outcome]
    ]
    about = (
        f"{summary.lines} lines in {seconds:.2f} s, {summary.lines / seconds:,.0f} a second,"
        " as `room-storage import` does it."
    )
    teller.table("Stored", about, ["outcome", "events"], rows)


async def synced(teller: TablePrinter, store: Store, story: DemoStory) -> None:
    """Show a first sync, a new event, and the next sync."""
    first = await store.sync(ALICE, rooms_limit=ROOMS_SHOWN, timeline_limit=3)
    more = "more" if first.next_rooms else "no more"
    about = f"The {ROOMS_SHOWN} rooms with the latest activity; there are {more}."
    teller.table("What Alice syncs first", about, SYNC_COLUMNS, _sync_rows(first))
    whole = await store.sync(ALICE, timeline_limit=1)
    new = story.room.message(CAROL, "Has anyone seen the key?")
    await store.append([new.pdu], verify_keys=story.room.keys)
    then = await store.sync(ALICE, since=whole.next_batch)
    teller.table(
        "What Alice syncs next",
        "Carol has said something; nothing else is new.",
        SYNC_COLUMNS,
        _sync_rows(then),
    )


SYNC_COLUMNS: Final = ["room", "timeline, latest last", "more before", "state"]


def _sync_rows(answer: Sync) -> list[tuple[object, ...]]:
    return [
        (
            room_id,
            "\n".join(
                f"{name(event.sender)}: {said(event)[:40]}" for event in room.timeline.events
            ),
            "yes" if room.timeline.limited else "no",
            len(room.state),
        )
        for room_id, room in answer.join.items()
    ]


async def paged(teller: TablePrinter, store: Store, room_id: RoomId) -> None:
    """Show two pages of history."""
    page = await store.messages(room_id, ALICE, limit=10)
    rows = [_line(event) for event in page.chunk]
    teller.table("A page of history for Alice, newest first", _end(page.end), PAGE_COLUMNS, rows)
    if page.end is not None:
        older = await store.messages(room_id, ALICE, from_=page.end, limit=10)
        teller.table(
            "The page before it",
            _end(older.end),
            PAGE_COLUMNS,
            [_line(event) for event in older.chunk],
        )


PAGE_COLUMNS: Final = ["order", "who", "what", "note"]


def _line(event: StoredEvent) -> tuple[object, ...]:
    return (
        event.topological_ordering,
        name(event.sender),
        said(event),
        "redacted" if event.redacted_by else "",
    )


def _end(end: str | None) -> str:
    return (
        "The room begins here."
        if end is None
        else f"Exactly as many as requested; the next page starts at the token {end[:24]}…"
    )


async def seen(teller: TablePrinter, store: Store, story: DemoStory) -> None:
    """Show which events are visible to whom."""
    ids = [event.event_id for event in story.room.events]
    held = await store.events(ids)
    sights = [await store.visible_to_user(user, ids) for user in (ALICE, BOB, DAVE)] + [
        await store.visible_to_server(REMOTE, ids)
    ]
    rows = [
        (
            name(held[one].sender),
            said(held[one])[:44],
            *("yes" if one in sight else "-" for sight in sights),
            _flags(held[one]),
        )
        for one in ids
    ]
    about = (
        "Bob came last, Dave left while only members could see;"
        " a soft-failed event is not visible to users."
    )
    teller.table(
        "Who may see what",
        about,
        ["who", "what", "Alice", "Bob", "Dave", f"server {REMOTE}", "note"],
        rows,
    )


def _flags(event: StoredEvent) -> str:
    flags = {
        "soft-failed": event.soft_failed,
        "rejected": event.rejected is not None,
        "redacted": event.redacted_by is not None,
    }
    return ", ".join(flag for flag, holds in flags.items() if holds)


async def state(teller: TablePrinter, store: Store, story: DemoStory) -> None:
    """Show the state at an old event, and now."""
    at = story.marks["spam"]
    then, now = await store.state_before(at.event_id), await store.current_state(story.room.room_id)
    held = await store.events({*_of(then), *_of(now)})
    rows = [
        (
            f"{type_} {name(key)}".strip(),
            _value(held, then.get((type_, key))),
            _value(held, now.get((type_, key))),
        )
        for type_, key in STATE_KEYS
    ]
    about = (
        f"{len(then)} entries then, {len(now)} now."
        " Of the two topics set at once, state resolution chose one."
    )
    teller.table("The state before Mallory's first words", about, ["key", "then", "now"], rows)


def _of(state: dict[StateKey, EventId]) -> Iterable[EventId]:
    return [state[key] for key in STATE_KEYS if key in state]


def _value(held: dict[EventId, StoredEvent], event_id: EventId | None) -> str:
    if event_id is None:
        return "-"
    content = held[event_id].content
    return str(
        next(
            (
                content[key]
                for key in ("topic", "history_visibility", "membership")
                if key in content
            ),
            "",
        )
    )


async def backfilled(teller: TablePrinter, store: Store, story: DemoStory) -> None:
    """Show a backfill for a remote server."""
    events = await store.backfill(
        story.room.room_id, [story.marks["last"].event_id], 16, server_name=REMOTE
    )
    held = await store.events([event.event_id for event in events])
    rows = [
        (
            event.depth,
            name(event.sender),
            said(event),
            "whole" if event.content == held[event.event_id].content else "redacted",
        )
        for event in events
    ]
    about = (
        f"No user of Mallory's server {REMOTE} is in the room any more:"
        " it gets messages among members redacted."
    )
    teller.table(
        f"A backfill for {REMOTE}, newest first", about, ["depth", "who", "what", "served"], rows
    )
