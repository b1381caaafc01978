"""Events as a process keeps them between batches: with what later checks read, and no more."""

from functools import lru_cache
from typing import Any, Final

from storage.event.model import Event, make_event
from storage.event.reading import LARGE
from storage.ids import EventId, intern

_MEMBER: Final = "m.room.member"
_MEMBER_KEYS: Final = ("membership", "join_authorised_via_users_server", "third_party_invite")
_WHOLE: Final = frozenset({
    "m.room.create",
    "m.room.history_visibility",
    "m.room.join_rules",
    "m.room.power_levels",
    "m.room.third_party_invite",
})  # fmt: skip
_NAMED: Final = ("m.new_content", "url")
"""Keys of a message of which only the presence counts."""
_NOTHING: Final[dict[str, Any]] = {}
SHARED: Final = 256  # contents
WORD_MAX: Final = 32  # characters


def without_json(event: Event) -> Event:
    """Return the event without its parsed object, which takes half of the memory of an event.

    The bytes that its signatures cover go, too. All other fields stay. A create event keeps `json`:
    only there values are looked up in it. Garbage collection also visits three objects less per
    event.
    """
    if event.type == "m.room.create" or not event.json:
        return event
    return _copied(event, event.content, event.raw)


def as_written(event: Event) -> Event:
    """Return a long message as planning and writing read it: without its other values.

    It may have 30,000 lists, and so may each event of its batch. They would all be freed at once.
    """
    if event.state_key is not None or len(event.raw) < LARGE:
        return event
    content: dict[str, Any] = {key: True for key in _NAMED if key in event.content}
    relates_to = event.content.get("m.relates_to")
    if isinstance(relates_to, dict):
        texts = ((key, relates_to.get(key)) for key in ("rel_type", "event_id"))
        content["m.relates_to"] = {key: value for key, value in texts if isinstance(value, str)}
    return _copied(event, content, event.raw)


def for_auth_checks(event: Event) -> Event:
    """Return an accepted state event as later auth checks and resolutions read it.

    It has no bytes, and of its content only what an auth rule or the visibility of history reads.
    Equal strings are one object (`storage.ids.intern`), as are equal contents of one word. The
    events of versions 1 and 2 keep their bytes: their reference hashes are cited.
    `docs/benchmarks/append.md` has the memory of a room.
    """
    if event.room_version.reference_pairs:
        return without_json(event)
    return _copied(event, _content(event), b"")


def _copied(event: Event, content: dict[str, Any], raw: bytes) -> Event:
    return make_event(
        intern(event.event_id),
        intern(event.room_id),
        event.room_version,
        intern(event.type),
        intern(event.sender),
        None if event.state_key is None else intern(event.state_key),
        content,
        event.depth,
        event.origin_server_ts,
        interned_ids(event.prev_event_ids),
        interned_ids(event.auth_event_ids),
        event.redacts,
        raw,
        event.json if event.type == "m.room.create" else _NOTHING,
        event.content_hash_valid,
        None,
    )


def interned_ids(ids: tuple[EventId, ...]) -> tuple[EventId, ...]:
    """Return the ids, each the one object that equal ids share."""
    return tuple(map(intern, ids))  # type: ignore[arg-type]


def _content(event: Event) -> dict[str, Any]:
    content = event.content
    if event.type == _MEMBER:
        content = {key: content[key] for key in _MEMBER_KEYS if key in content}
    elif event.type not in _WHOLE:
        return _NOTHING
    if len(content) == 1:
        [(key, value)] = content.items()
        if type(value) is str and len(value) <= WORD_MAX:
            return _of_one_word(key, value)
    return content


@lru_cache(SHARED)
def _of_one_word(key: str, value: str) -> dict[str, Any]:
    return {key: value}
