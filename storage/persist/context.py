"""What planning reads: caches of committed rows, overlaid by what the batch in hand has added.

Planning is synchronous and touches no database. Where it lacks something it raises `Needs`, which names what is missing;
the driver loads it (`storage.persist.load`) and asks again. Nothing is changed before everything that a decision needs is
there, so asking again is harmless. Cached rows are immutable, or guarded by `rooms.write_version`: a plan made from a stale
cache is refused when it is written, and the rooms concerned are forgotten. What was thrown away by somebody else is told in the stream
"caches" (`Removed`); until that is here, `rooms.removals` has a write look whether all that it builds on is there still.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Final

from immutables import Map

from storage.database.names import Names
from storage.errors import StorageCorrupt
from storage.event import Event
from storage.graph.chains import Chain, Closure, Place
from storage.measures import Distribution
from storage.persist.bounded import Bounded
from storage.persist.records import MOST, Record
from storage.persist.rows import UNSEEN, Allowed, AudienceRow, Counts, EventRow, MissingRow, PastRow, RoomRow, VisibilityRow
from storage.persist.turns import Turn
from storage.state.groups import Group
from storage.state.groups import Step as Row
from storage.streams.caches import Removed
from storage.visibility import past

ABSENT: Final[Any] = None  # looked up in the database, and not there


class Needs(Exception):  # noqa: N818  # a question to the driver, not an error
    """Planning cannot go on without these: kind of thing -> keys."""

    def __init__(self, kind: str, keys: Iterable[Hashable]) -> None:
        super().__init__(kind)
        self.kind = kind
        self.keys = set(keys)


class Pause(Needs):
    """The turn is over in the middle of a state resolution. Asked again, planning goes on with it where it stopped."""

    def __init__(self) -> None:
        super().__init__("turn", ())


class States(Bounded[int, Group]):
    """State groups, bounded by the entries in memory, too: rows of paths that several of them share count once."""

    def __init__(self, limit: int, entries_max: int) -> None:
        super().__init__(limit)
        self.entries_max = entries_max
        self.clear()

    def clear(self) -> None:
        """Forget all of them."""
        super().clear()
        self.entries = 0
        self._rows: dict[int, Row] = {}  # by identity

    def keep(self, groups: Mapping[int, Group]) -> None:
        """Remember these groups."""
        for state_group, group in groups.items():
            self[state_group] = group
            for row in group.steps:
                if id(row) not in self._rows:
                    self._rows[id(row)] = row
                    self.entries += len(row.delta)

    def drop(self, state_groups: Iterable[int]) -> None:
        """Forget these groups."""
        gone = self.keys() & set(state_groups)
        if gone:
            kept = {state_group: group for state_group, group in self.items() if state_group not in gone}
            self.clear()
            self.keep(kept)

    def trim(self) -> None:
        """Forget the older ones, down to half of what is allowed, but not the last."""
        if len(self) <= self.limit and self.entries <= self.entries_max:
            return
        newest = list(reversed(self.items()))
        self.clear()
        kept: dict[int, Group] = {}
        for state_group, group in newest[: max(1, self.limit // 2)]:
            self.keep({state_group: group})
            if kept and self.entries > self.entries_max // 2:
                break
            kept[state_group] = group
        self.clear()
        self.keep(dict(reversed(kept.items())))


class Records(Bounded[int, list[Record]]):
    """Records of resolutions by room, bounded by their events."""

    def trim(self) -> None:
        """Forget those of the rooms that resolved least recently."""
        left = sum(len(record.full) for records in self.values() for record in records)
        for room_nid in list(self):
            if left <= self.limit:
                return
            left -= sum(len(record.full) for record in self.pop(room_nid))


class Caches:
    """What one process remembers of committed rows. Every value may be forgotten at any time between batches."""

    def __init__(self, *, events: int, groups: int, state_entries: int, rooms: int, names: int) -> None:
        self.names = Names(names)
        self.rooms: Bounded[str, RoomRow] = Bounded(rooms)
        self.rows: Bounded[str, EventRow] = Bounded(events)
        self.row_ids: Bounded[int, str] = Bounded(events)
        self.missing: Bounded[str, MissingRow] = Bounded(events)
        self.events: Bounded[int, Event] = Bounded(events)
        self.groups = States(groups, state_entries)
        self.visibility: Bounded[tuple[int, int], VisibilityRow] = Bounded(events)
        self.audiences: Bounded[tuple[int, int], AudienceRow] = Bounded(events)
        self.merged: Bounded[frozenset[int], int] = Bounded(groups)
        self.counts: Bounded[int, Map[int, Counts]] = Bounded(groups)
        """By state group and principal, the users of the latter, as far as they are known."""
        self.places: Bounded[int, Place] = Bounded(events)
        self.chains: Bounded[int, Chain] = Bounded(events)
        self.closures: Bounded[int, Closure] = Bounded(events)
        self.allowed: Bounded[tuple[object, ...], Allowed] = Bounded(events)
        self.records = Records(MOST)
        self.has_past = False
        """`past_visibility` is in use. Once it is, it is for good."""
        self.resolutions = Distribution()
        """Seconds of processor time that state resolutions took, without the loading."""
        self._bounded = [cache for cache in vars(self).values() if isinstance(cache, Bounded)]

    def sizes(self) -> dict[str, int]:
        """How many entries each cache has."""
        return {name: len(cache) for name, cache in vars(self).items() if isinstance(cache, Bounded)}

    def add_row(self, row: EventRow) -> None:
        """Remember an event's row under its id and its nid."""
        self.rows[row.event_id] = row
        self.row_ids[row.event_nid] = row.event_id

    def trim(self) -> None:
        """Keep within the limits.

        What is cached of a room is guarded by the version in its row: a row that were forgotten alone would be read again with the
        version of today, and guard the stale rest.
        """
        if len(self.rooms) > self.rooms.limit:
            self._clear()
        for cache in self._bounded:
            if len(cache) > cache.limit:
                cache.trim()
        self.groups.trim()

    def remove(self, removed: Removed) -> None:
        """Forget what was thrown away. A room's row is good for what comes next if this is all that it does not know of."""
        self.records.clear()
        if removed.kind == "state_groups":
            self._remove_groups(set(map(int, removed.ids)))
        for event_id in removed.event_ids:
            self._remove_event(event_id)
        for event_nid in removed.event_nids:  # what is left reaches none of them: its closures stay
            self.places.pop(event_nid, None)
            self.closures.pop(event_nid, None)
        if removed.kind == "held":
            self.allowed.clear()
        room = self.rooms.get(removed.room_id)
        if room is not None and room.removals + 1 == removed.number:
            self.rooms[removed.room_id] = room._replace(removals=removed.number)

    def _remove_groups(self, gone: set[int]) -> None:
        self.groups.drop(gone)
        for states in [states for states, state_group in self.merged.items() if state_group in gone or not gone.isdisjoint(states)]:
            del self.merged[states]

    def _remove_event(self, event_id: str) -> None:
        self.missing.pop(event_id, None)
        row = self.rows.pop(event_id, None)
        if row is not None:
            self.row_ids.pop(row.event_nid, None)
            self.events.pop(row.event_nid, None)
            self.places.pop(row.event_nid, None)

    def forget(self) -> None:
        """Forget everything: after a refused plan, whose reason may lie in any of the rows."""
        self._clear()
        self.names.forget()

    def _clear(self) -> None:
        for cache in self._bounded:
            cache.clear()


class Reader:
    """The overlay of one batch over the caches. What is added here reaches the caches only after the commit."""

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self.rows: dict[str, EventRow | None] = {}
        self.row_ids: dict[int, str] = {}  # "" where no event has the nid
        self.missing: dict[str, MissingRow | None] = {}
        self.gap_ids: dict[int, str] = {}
        self.waiting: dict[str, tuple[int, ...]] = {}
        self.pending: EventRow | None = None
        self.pending_event: Event | None = None
        self.events: dict[int, Event] = {}
        self.groups: dict[int, Group] = {}
        self.visibility: dict[tuple[int, int], VisibilityRow] = {}
        self.past: dict[tuple[int, int], dict[int, PastRow]] = {}  # by first audience
        self.audiences: dict[tuple[int, int], AudienceRow] = {}
        self.counts: dict[int, Map[int, Counts]] = {}
        self.places: dict[int, Place] = {}
        self.chains: dict[int, Chain] = {}
        self.closures: dict[int, Closure] = {}
        self.loose: set[int] = set()  # the database has no place for these
        self.allowed: dict[tuple[object, ...], Allowed] = {}
        self.rooms: dict[str, RoomRow | None] = {}
        self.types: dict[str, int | None] = {}
        self.type_names: dict[int, str] = {}
        self.state_keys: dict[tuple[int, str], int | None] = {}
        self.state_key_names: dict[int, tuple[int, str]] = {}
        self.principals: dict[str, int | None] = {}
        self.newcomers: set[int] = set()  # principals that have no row anywhere yet
        self.fresh_rooms: set[int] = set()  # rooms that have no row of any kind yet
        self.answers: dict[Hashable, Any] = {}
        self.records: dict[int, list[Record]] = {}
        self.turn = Turn()
        self.resolving_seconds: dict[str, float] = {}
        """By room, the seconds of processor time that state resolutions took."""

    def row(self, event_id: str) -> EventRow | None:
        """The row of an event, or None if it is not held."""
        if self.pending is not None and self.pending.event_id == event_id:
            return self.pending
        if event_id in self.rows:
            return self.rows[event_id]
        row = self.caches.rows.get(event_id)
        if row is None:
            raise Needs("event_ids", (event_id,))
        return row

    def find_row(self, event_nid: int) -> EventRow | None:
        """The row of an event by nid, or None if it is only referred to, and not held."""
        if self.pending is not None and self.pending.event_nid == event_nid:
            return self.pending
        event_id = self.row_ids.get(event_nid)
        if event_id is None:
            event_id = self.caches.row_ids.get(event_nid)
        if event_id == "":
            return None
        row = None if event_id is None else self.rows.get(event_id) or self.caches.rows.get(event_id)
        if row is None:
            raise Needs("event_nids", (event_nid,))
        return row

    def known_row(self, event_nid: int) -> EventRow | None:
        """The row of an event if it is at hand; None says nothing about the event."""
        if self.pending is not None and self.pending.event_nid == event_nid:
            return self.pending
        event_id = self.row_ids.get(event_nid) or self.caches.row_ids.get(event_nid)
        return None if event_id is None else self.rows.get(event_id) or self.caches.rows.get(event_id)

    def sender_of(self, row: EventRow) -> str:
        """Who sent an event."""
        name = self.caches.names.principal_names.get(row.sender_nid)
        return name if name is not None else self.events_of((row.event_nid,))[row.event_nid].sender

    def row_of(self, event_nid: int) -> EventRow:
        """The row of an event that must be held; `StorageCorrupt` if it is not."""
        row = self.find_row(event_nid)
        if row is None:
            raise StorageCorrupt("an event that a row refers to is not held", event_nid=event_nid)
        return row

    def missing_row(self, event_id: str) -> MissingRow | None:
        """What waits for an event that is not held in the timeline, or None if nothing does."""
        if event_id in self.missing:
            return self.missing[event_id]
        row = self.caches.missing.get(event_id)
        if row is None:
            raise Needs("event_ids", (event_id,))
        return row

    def gap(self, event_nid: int) -> MissingRow | None:
        """The gap that a nid stands for; None if the event has arrived."""
        if event_nid not in self.gap_ids:
            raise Needs("gap_nids", (event_nid,))
        return self.missing_row(self.gap_ids[event_nid])

    def waiting_for(self, event_id: str) -> tuple[int, ...]:
        """The nids of the redactions that wait for an event."""
        if event_id not in self.waiting:
            raise Needs("event_ids", (event_id,))
        return self.waiting[event_id]

    def events_of(self, event_nids: Iterable[int]) -> dict[int, Event]:
        """Events with their content, by nid. All must be held."""
        found: dict[int, Event] = {}
        unknown: list[int] = []
        for nid in event_nids:
            event = self.events.get(nid) or self.caches.events.get(nid)
            if event is None and self.pending is not None and self.pending.event_nid == nid:
                event = self.pending_event
            if event is None:
                unknown.append(nid)
            else:
                found[nid] = event
        if unknown:
            raise Needs("events", unknown)
        return found

    def at_hand(self, event_id: str) -> tuple[EventRow, Event] | None:
        """The row of an event and its content, if both are in memory; None says nothing about the event."""
        if self.pending is not None and self.pending.event_id == event_id:
            return None if self.pending_event is None else (self.pending, self.pending_event)
        row = self.rows.get(event_id) or self.caches.rows.get(event_id)
        event = None if row is None else self.events.get(row.event_nid) or self.caches.events.get(row.event_nid)
        return None if row is None or event is None else (row, event)

    def group(self, state_group: int) -> Group:
        """A state group with its whole state."""
        group = self.groups.get(state_group) or self.caches.groups.get(state_group)
        if group is None:
            raise Needs("groups", (state_group,))
        return group

    def counts_of(self, state_group: int) -> Map[int, Counts]:
        """By principal, the users in a state, as far as they are known."""
        return self.counts.get(state_group) or self.caches.counts.get(state_group) or Map()

    def visible(self, room_nid: int, principal_nid: int) -> VisibilityRow:
        """The visibility row of a principal; `UNSEEN` if it has none."""
        key = (room_nid, principal_nid)
        row = self.visibility.get(key) or self.caches.visibility.get(key)
        if row is None:
            if principal_nid in self.newcomers or room_nid in self.fresh_rooms:
                return UNSEEN
            raise Needs("visibility", (key,))
        return row

    def ensure_audiences(self, room_nid: int, audiences: Iterable[int]) -> None:
        """Have the rows of these audiences."""
        self._ensure("audiences", ((room_nid, number) for number in audiences), self.audiences, self.caches.audiences)

    def past_row(self, room_nid: int, principal_nid: int, number: int) -> PastRow:
        """The row of a principal that tells of an audience below the first one of its row of `visibility`."""
        for row in self.past.get((room_nid, principal_nid), {}).values():
            if row.tells_of(number):
                return row
        raise Needs("past", ((room_nid, principal_nid, number),))

    def cuts(self, row: VisibilityRow) -> bool:
        """Whether the older ranges of a row go to rows of `past_visibility`: it has too many, and no code is left that does not know these."""
        if past.boundary(row.audiences, row.invited_audiences) is None:
            return False
        return self.caches.has_past or bool(self.answer(("has_past",)))

    def audience(self, room_nid: int, number: int) -> AudienceRow:
        """The row of an audience in use."""
        key = (room_nid, number)
        row = self.audiences.get(key) or self.caches.audiences.get(key)
        if row is None:
            raise Needs("audiences", (key,))
        return row

    def place(self, event_nid: int) -> Place:
        """Where an accepted state event stands in the chain cover."""
        place = self.places.get(event_nid) or self.caches.places.get(event_nid)
        if place is None:
            raise Needs("places", (event_nid,))
        return place

    def chain(self, chain_nid: int) -> Chain:
        """A chain of the cover."""
        chain = self.chains.get(chain_nid) or self.caches.chains.get(chain_nid)
        if chain is None:
            raise Needs("chains", (chain_nid,))
        return chain

    def room(self, room_id: str) -> RoomRow | None:
        """The row of a room, or None if the store does not know it."""
        if room_id in self.rooms:
            return self.rooms[room_id]
        row = self.caches.rooms.get(room_id)
        if row is None:
            raise Needs("rooms", (room_id,))
        return row

    def find_type(self, name: str) -> int | None:
        """The nid of an event type, or None if it has none yet."""
        nid = self.caches.names.types.get(name) or self.types.get(name)
        if nid is None and name not in self.types:
            raise Needs("types", (name,))
        return nid

    def type_name(self, type_nid: int) -> str:
        """The event type behind a nid."""
        name = self.caches.names.type_names.get(type_nid) or self.type_names.get(type_nid)
        if name is None:
            raise Needs("type_names", (type_nid,))
        return name

    def find_state_key(self, type_nid: int, state_key: str) -> int | None:
        """The nid of a state key, or None if it has none yet."""
        key = (type_nid, state_key)
        nid = self.caches.names.state_keys.get(key) or self.state_keys.get(key)
        if nid is None and key not in self.state_keys:
            raise Needs("state_keys", (key,))
        return nid

    def state_key_name(self, state_key_nid: int) -> tuple[int, str]:
        """Return the type nid and the state key behind a nid. From now on the draft knows them: the caches may forget before it is written."""
        name = self.state_key_names.get(state_key_nid)
        if name is None:
            name = self.caches.names.state_key_names.get(state_key_nid)
            if name is None:
                raise Needs("state_key_names", (state_key_nid,))
            self.state_key_names[state_key_nid] = name
        return name

    def find_principal(self, name: str) -> int | None:
        """The nid of a user or server, or None if it has none yet."""
        nid = self.caches.names.principals.get(name) or self.principals.get(name)
        if nid is None and name not in self.principals:
            raise Needs("principals", (name,))
        return nid

    def records_of(self, room_nid: int) -> list[Record]:
        """What is remembered of a room's resolutions; from here on it is this draft's alone."""
        known = self.records.get(room_nid)
        if known is None:
            known = self.records[room_nid] = self.caches.records.pop(room_nid, [])
        return known

    # ---------------------------------------------------------------------------------------------- many at once

    def ensure_ids(self, event_ids: Iterable[str]) -> None:
        """Know of each of these events whether it is held."""
        pending = self.pending.event_id if self.pending is not None else None
        self._ensure("event_ids", (one for one in event_ids if one != pending), self.rows, self.caches.rows)

    def ensure_rows(self, event_nids: Iterable[int]) -> None:
        """Have the rows of these events."""
        pending = self.pending.event_nid if self.pending is not None else None
        self._ensure("event_nids", (nid for nid in event_nids if nid != pending), self.row_ids, self.caches.row_ids)

    def ensure_state_key_names(self, state_key_nids: Iterable[int]) -> None:
        """Have the names behind these state keys, until the draft is written."""
        known = self.caches.names.state_key_names
        lacking = [nid for nid in state_key_nids if nid not in self.state_key_names]
        self.state_key_names.update((nid, known[nid]) for nid in lacking if nid in known)
        self._ensure("state_key_names", lacking, self.state_key_names, known)

    def ensure_principals(self, names: Iterable[str]) -> None:
        """Know the nids of these users and servers, or that they have none."""
        self._ensure("principals", names, self.principals, self.caches.names.principals)

    def ensure_places(self, event_nids: Iterable[int]) -> None:
        """Have the places of these events."""
        self._ensure("places", event_nids, self.places, self.caches.places)

    def ensure_standing(self, event_nids: Iterable[int]) -> None:
        """Have the places and rows of these events, to walk on from them."""
        unknown = [nid for nid in event_nids if (nid not in self.places and nid not in self.caches.places) or self.known_row(nid) is None]
        if unknown:
            raise Needs("standing", unknown)

    def ensure_visible(self, room_nid: int, principal_nids: Iterable[int]) -> None:
        """Have the visibility rows of these principals."""
        if room_nid in self.fresh_rooms:
            return
        keys = ((room_nid, principal) for principal in principal_nids if principal not in self.newcomers)
        self._ensure("visibility", keys, self.visibility, self.caches.visibility)

    @staticmethod
    def _ensure(kind: str, keys: Iterable[Any], overlay: dict[Any, Any], cache: dict[Any, Any]) -> None:
        unknown = [key for key in keys if key not in overlay and key not in cache]
        if unknown:
            raise Needs(kind, unknown)

    def assume_new(self, event_ids: Iterable[str]) -> None:
        """Take these events for never heard of, without asking. A write that was planned so is refused if it is not true."""
        for event_id in event_ids:
            if event_id not in self.caches.rows:
                self.rows[event_id] = None
                self.waiting[event_id] = ()
                self.missing[event_id] = self.caches.missing.get(event_id)

    def answer(self, question: Hashable) -> Any:
        """What the database said to a question that only it can answer (see `storage.persist.load`)."""
        if question not in self.answers:
            raise Needs("questions", (question,))
        return self.answers[question]


__all__ = ["ABSENT", "UNSEEN", "Bounded", "Caches", "Needs", "Pause", "Reader", "StorageCorrupt"]
