"""A state: of a room now, at an event, or the difference of the states after two events.

Reads: `Store.current_state`, `Store.state_before`, `Store.state_after`, `Store.states_after`; the
shown events from `storage.queries.inspect.lines`. A state is read whole, and shown in parts.
"""

from typing import Any, Final, NamedTuple

from starlette.responses import Response

from storage import arguments as args
from storage.errors import InputError
from storage.ids import EventId, StateKey
from storage.inspector.pages.room import contents_of
from storage.inspector.visit import Visit
from storage.queries.inspect.lines import EventLine, lines_by_id
from storage.queries.state_entries import StateMap

SHOWN: Final = 200


class StateEntry(NamedTuple):
    """A key, its value, and in a difference the value before: None for no value."""

    key: StateKey
    before: EventId | None
    after: EventId | None


async def page(visit: Visit) -> Response:
    """Show a state, or a difference."""
    before, after, what = await _wanted(visit)
    entries = _entries(before, after, visit.text("q") or "")
    offset = visit.whole("offset") or 0
    shown, content = entries[offset : offset + SHOWN], visit.content()
    lines = await _lines(visit, shown)
    return visit.render(
        "state.html",
        entries=shown,
        count=len(entries),
        total=len(after),
        offset=offset,
        step=SHOWN,
        lines=lines,
        contents=await contents_of(visit, list(lines.values())) if content else {},
        is_difference=before is not None,
        shown_content=content,
        **what,
    )


async def _wanted(visit: Visit) -> tuple[StateMap | None, StateMap, dict[str, Any]]:
    """Return the state before (None: no difference), the state, and what it is."""
    store = visit.store
    what: dict[str, Any] = dict.fromkeys(("room_id", "event_id", "when", "other"))
    if visit.text("room") is not None:
        room_id = visit.room("room")
        return None, await store.current_state(room_id), {**what, "room_id": room_id}
    event_id, when = visit.event("event"), visit.text("when") or "after"
    what |= {"event_id": event_id, "when": when}
    if visit.text("other") is not None:
        other = args.event(visit.wanted("other"))
        states = await store.states_after([event_id, other])
        return states[event_id], states[other], {**what, "other": other}
    if when == "change":
        before, after = await store.state_before(event_id), await store.state_after(event_id)
        return before, after, what
    if when not in {"before", "after"}:
        raise InputError(f"when is {when!r}: before, after or change is wanted")
    read = store.state_before if when == "before" else store.state_after
    return None, await read(event_id), what


def _entries(before: StateMap | None, after: StateMap, wanted: str) -> list[StateEntry]:
    """Return the entries, or in a difference those that differ, whose key has a text in it."""
    old = before or {}
    keys = after.keys() if before is None else old.keys() | after.keys()
    return [
        StateEntry(key, old.get(key), after.get(key))
        for key in sorted(keys)
        if (before is None or old.get(key) != after.get(key))
        and (wanted in key[0] or wanted in key[1])
    ]


async def _lines(visit: Visit, entries: list[StateEntry]) -> dict[EventId, EventLine]:
    ids = {one for entry in entries for one in (entry.before, entry.after) if one is not None}
    return await visit.read(lines_by_id, sorted(ids))
