"""Loading ahead what a batch is going to need, in one statement: what its events name, as far as the caches lack it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from storage.database.names import PRINCIPAL_EVERYBODY, PRINCIPAL_SHARED, TYPE_MEMBER
from storage.event import Event, relation_of
from storage.ids import server_name_of
from storage.persist.context import Caches, Needs
from storage.persist.draft import BLOCK_LENGTHS, Draft
from storage.persist.plan import Incoming

MEMBER: Final = "m.room.member"
STANDING: Final = {"*everybody": PRINCIPAL_EVERYBODY, "*shared": PRINCIPAL_SHARED}  # principals that stand for many

NUMBERS_AHEAD: Final = 4  # so many times what a batch needs is taken of a sequence

Load = Callable[[Draft, Needs], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Lacking:
    """What `storage.persist.ahead` is asked for; ids and names, and nids where they are known."""

    rooms: set[str] = field(default_factory=set)
    events: set[str] = field(default_factory=set)
    parents: set[str] = field(default_factory=set)  # of the events: those whose states are wanted
    auth: set[str] = field(default_factory=set)  # of the events: those whose contents and places are wanted
    contents: set[int] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    places: set[int] = field(default_factory=set)
    principals: set[str] = field(default_factory=set)
    types: set[str] = field(default_factory=set)
    state_keys: set[tuple[str, str]] = field(default_factory=set)
    seen: set[tuple[str, str]] = field(default_factory=set)  # room, user or server
    numbers: dict[str, int] = field(default_factory=dict)  # of a sequence, so many at least

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to load."""
        return not any(getattr(self, name) for name in self.__slots__)

    @property
    def is_of_names(self) -> bool:
        """Whether rooms and events are all known."""
        return not (self.rooms or self.events or self.contents or self.groups or self.places)


class Ahead:
    """The question for all that a batch lacks, on its way while the events that need none of it are planned.

    ``assumed``: whether the batch's events were taken for new.
    """

    def __init__(self, load: Load, draft: Draft, lacking: Lacking, *, assumed: bool) -> None:
        self.assumed = assumed
        self._load = None if lacking.is_empty else asyncio.ensure_future(load(draft, Needs("ahead", (lacking,))))

    async def landed(self) -> bool:
        """Wait for the answer; whether there was one to wait for. Raises what asking raised."""
        load, self._load = self._load, None
        if load is not None:
            await load
        return load is not None


async def prefetch(load: Load, draft: Draft, incoming: Sequence[Incoming], *, assume_new: bool) -> Ahead:
    """Ask for what the events name: rooms, parents, auth events, the states after the parents, names.

    The events themselves are taken for new, as ``assume_new`` allows, where nothing speaks against it: all other events that they name
    are in the caches. Otherwise the answer is here already.
    """
    lacking = Lacking()
    ids: set[str] = {one.event.event_id for one in incoming}
    own = {one for one in ids if one not in draft.caches.rows and one not in draft.rows}
    for room_id in {one.event.room_id for one in incoming}:
        _look_at_room(draft, room_id, lacking)
    for one in incoming:
        _look(draft, one, own, lacking)
    assumed = assume_new and not (lacking.rooms or lacking.events)
    if assumed:
        draft.assume_new(own)
    else:
        lacking.events |= own
    wanted = dict.fromkeys(BLOCK_LENGTHS, 1) | {"event_nids": len(incoming), "state_group_nids": len(incoming) + 2}
    lacking.numbers = {name: NUMBERS_AHEAD * number for name, number in wanted.items() if draft.blocks.left(name) < number}
    ahead = Ahead(load, draft, lacking, assumed=assumed)
    if not assumed:
        await ahead.landed()
    elif not lacking.is_empty:
        await asyncio.sleep(0)  # it is on its way before anything is planned
    return ahead


def _look(draft: Draft, one: Incoming, own: set[str], lacking: Lacking) -> None:
    event, caches = one.event, draft.caches
    held = caches.rows.get(event.event_id)
    if (
        held is not None and held.outlier and (one.origin != "outlier" or held.is_out_of_band)
    ):  # as below: it may be a duplicate by now, or have missing parents
        _want(draft, event.event_id, own, lacking, lacking.events)
    _look_at_parents(draft, event, own, lacking)
    if "m.relates_to" in event.content:
        _look_at_relation(draft, event, lacking)
    if _is_ordinary(caches, one):
        return
    for event_id in event.auth_event_ids:
        row = caches.rows.get(event_id) or draft.rows.get(event_id)
        if row is None or (row.outlier and row.is_out_of_band):  # another writer may have authorised it
            _want(draft, event_id, own, lacking, lacking.auth)
        else:
            _look_at_auth_event(draft, row.event_nid, lacking, placed=event.state_key is not None)
    for event_id in (*(one.state_before or ()), *((event.redacts,) if event.redacts is not None else ())):
        row = caches.rows.get(event_id)
        if row is None or row.is_out_of_band:
            _want(draft, event_id, own, lacking, lacking.events)
    _look_at_names(draft, event, lacking)


def _is_ordinary(caches: Caches, one: Incoming) -> bool:
    """Whether it is a message like one before it: then `storage.persist.plain` needs no more than its parents, and its relation's type."""
    event = one.event
    if event.state_key is not None or one.state_before is not None:
        return False
    return (event.sender, event.type, event.auth_event_ids, event.room_id) in caches.allowed


def _look_at_parents(draft: Draft, event: Event, own: set[str], lacking: Lacking) -> None:
    caches = draft.caches
    for event_id in event.prev_event_ids:
        row = caches.rows.get(event_id) or draft.rows.get(event_id)
        if row is None or row.outlier:  # another writer may have made it more than an outlier, and nothing is written then that would tell
            _want(draft, event_id, own, lacking, lacking.parents)
        elif row.after not in caches.groups and row.after not in draft.groups:
            lacking.groups.add(row.after)


def _look_at_room(draft: Draft, room_id: str, lacking: Lacking) -> None:
    if room_id in draft.rooms:
        return
    room = draft.caches.rooms.get(room_id)
    if room is None:
        lacking.rooms.add(room_id)
    elif room.current_state_group is not None and room.current_state_group not in draft.caches.groups:
        lacking.groups.add(room.current_state_group)


def _look_at_relation(draft: Draft, event: Event, lacking: Lacking) -> None:
    relation = relation_of(event)
    if relation is not None:
        _look_at_type(draft, relation.rel_type, lacking)


def _look_at_type(draft: Draft, name: str, lacking: Lacking) -> None:
    if name not in draft.caches.names.types and name not in draft.types:
        lacking.types.add(name)


def _want(draft: Draft, event_id: str, own: set[str], lacking: Lacking, kind: set[str]) -> None:
    """An event that is not in the caches, unless it comes with the batch, or is known not to be held."""
    if event_id not in own and event_id not in draft.rows:
        lacking.events.add(event_id)
        kind.add(event_id)


def _look_at_auth_event(draft: Draft, nid: int, lacking: Lacking, *, placed: bool) -> None:
    if nid not in draft.caches.events and nid not in draft.events:
        lacking.contents.add(nid)
    if placed and nid not in draft.caches.places and nid not in draft.places:
        lacking.places.add(nid)


def _look_at_names(draft: Draft, event: Event, lacking: Lacking) -> None:
    """The sender, also as a member, the type and the state key."""
    names = draft.caches.names
    if event.sender not in names.principals and event.sender not in draft.principals:
        lacking.principals.add(event.sender)
    if (TYPE_MEMBER, event.sender) not in names.state_keys and (TYPE_MEMBER, event.sender) not in draft.state_keys:
        lacking.state_keys.add((MEMBER, event.sender))
    _look_at_type(draft, event.type, lacking)
    if event.state_key is None:
        return
    type_nid = names.types.get(event.type) or draft.types.get(event.type)
    key = (type_nid, event.state_key)
    if type_nid is None or (key not in names.state_keys and key not in draft.state_keys):
        lacking.state_keys.add((event.type, event.state_key))
    if event.type == MEMBER:
        _look_at_member(draft, event.room_id, event.state_key, lacking)


def _look_at_member(draft: Draft, room_id: str, user: str, lacking: Lacking) -> None:
    """What the server, and a local member, may see so far, and those who stand for many."""
    names = draft.caches.names
    room = draft.caches.rooms.get(room_id) or draft.rooms.get(room_id)
    server = server_name_of(user)
    for name in (server, *((user,) if server == draft.server_name else ()), *STANDING):
        nid = STANDING.get(name) or names.principals.get(name) or draft.principals.get(name)
        if nid is None and name not in draft.principals:
            lacking.principals.add(name)
        if (nid is None and name not in draft.principals) or (
            nid is not None and (room is None or not draft.knows_visibility(room.room_nid, nid))
        ):
            lacking.seen.add((room_id, name))
