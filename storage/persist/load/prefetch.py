"""Load ahead what a batch will need, in one statement: what its events name and the caches lack."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from storage.database.names import PRINCIPAL_EVERYBODY, PRINCIPAL_SHARED, TYPE_MEMBER
from storage.event import Event, relation_of
from storage.ids import server_name_of
from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import AnyEvent, IncomingEvent
from storage.persist.model.local_event import LocalEvent
from storage.persist.model.missing_data import MissingData
from storage.persist.model.nid_blocks import BLOCK_LENGTHS

MEMBER: Final = "m.room.member"
STANDING: Final = {
    "*everybody": PRINCIPAL_EVERYBODY,
    "*shared": PRINCIPAL_SHARED,
}  # principals that stand for many

NUMBERS_AHEAD: Final = 4  # so many times what a batch needs is taken of a sequence

Load = Callable[[ChangeSet, MissingData], Awaitable[None]]


@dataclass(slots=True, eq=False)
class BatchRequest:
    """The request for `prefetch_rows`: ids and names, and nids if they are known."""

    rooms: set[str] = field(default_factory=set)
    events: set[str] = field(default_factory=set)
    parents: set[str] = field(default_factory=set)  # of the events: those whose states are wanted
    auth: set[str] = field(
        default_factory=set
    )  # of the events: those whose contents and places are wanted
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
        """Return whether there is nothing to load."""
        return not any(getattr(self, name) for name in self.__slots__)

    @property
    def is_of_names(self) -> bool:
        """Return whether all rooms and events are known."""
        return not (self.rooms or self.events or self.contents or self.groups or self.places)


class PendingPrefetch:
    """A load for a batch that runs while the events that do not need it are planned.

    ``assumed``: whether the events of the batch were assumed to be new.
    """

    def __init__(
        self, load: Load, change_set: ChangeSet, lacking: BatchRequest, *, assumed: bool
    ) -> None:
        self.assumed = assumed
        self._load = (
            None
            if lacking.is_empty
            else asyncio.ensure_future(load(change_set, MissingData("ahead", (lacking,))))
        )

    async def landed(self) -> bool:
        """Wait for the load; return whether there was one. Raise what it raised."""
        load, self._load = self._load, None
        if load is not None:
            await load
        return load is not None


async def prefetch(
    load: Load, change_set: ChangeSet, incoming: Sequence[AnyEvent], *, assume_new: bool
) -> PendingPrefetch:
    """Load what the events name: rooms, parents, auth events, states after the parents, names.

    If ``assume_new`` allows it, and the caches have all other events that they name, the events are
    assumed to be new. Then the load may still run on return; otherwise it is done. So are the
    requests of clients that make events here; without ``assume_new`` they are looked up.
    """
    if not assume_new:
        await _load_transactions(load, change_set, incoming)
    lacking = BatchRequest()
    received = [one for one in incoming if isinstance(one, IncomingEvent)]
    ids: set[str] = {one.event.event_id for one in received}
    own = {
        one
        for one in ids
        if one not in change_set.caches.rows and one not in change_set.events.rows
    }
    for room_id in {one.room_id for one in incoming}:
        _look_at_room(change_set, room_id, lacking)
    for one in received:
        _look(change_set, one, own, lacking)
    assumed = assume_new and not (lacking.rooms or lacking.events)
    if assumed:
        change_set.events.assume_new(own)
    else:
        lacking.events |= own
    wanted = dict.fromkeys(BLOCK_LENGTHS, 1) | {
        "event_nids": len(incoming),
        "state_group_nids": len(incoming) + 2,
    }
    lacking.numbers = {
        name: NUMBERS_AHEAD * number
        for name, number in wanted.items()
        if change_set.blocks.left(name) < number
    }
    ahead = PendingPrefetch(load, change_set, lacking, assumed=assumed)
    if not assumed:
        await ahead.landed()
    elif not lacking.is_empty:
        await asyncio.sleep(0)  # it is on its way before anything is planned
    return ahead


async def _load_transactions(
    load: Load, change_set: ChangeSet, incoming: Sequence[AnyEvent]
) -> None:
    """Look up which of the local events are of repeated requests."""
    transactions = [
        one.transaction
        for one in incoming
        if isinstance(one, LocalEvent) and one.transaction is not None
    ]
    if transactions:
        await load(change_set, MissingData("transactions", transactions))


def _look(change_set: ChangeSet, one: IncomingEvent, own: set[str], lacking: BatchRequest) -> None:
    event, caches = one.event, change_set.caches
    held = caches.rows.row(event.event_id)
    if held is not None:
        if not held.outlier or (one.origin == "outlier" and not held.is_out_of_band):
            return  # a duplicate, which needs nothing
        # as below: it may be a duplicate by now, or have missing parents
        _want(change_set, event.event_id, own, lacking, lacking.events)
    _look_at_parents(change_set, event, own, lacking)
    if "m.relates_to" in event.content:
        _look_at_relation(change_set, event, lacking)
    if _is_ordinary(caches, one):
        return
    for event_id in event.auth_event_ids:
        row = caches.rows.row(event_id) or change_set.events.rows.get(event_id)
        if row is None or (
            row.outlier and row.is_out_of_band
        ):  # another writer may have authorised it
            _want(change_set, event_id, own, lacking, lacking.auth)
        else:
            _look_at_auth_event(
                change_set, row.event_nid, lacking, placed=event.state_key is not None
            )
    for event_id in (
        *(one.state_before or ()),
        *((event.redacts,) if event.redacts is not None else ()),
    ):
        row = caches.rows.row(event_id)
        if row is None or row.is_out_of_band:
            _want(change_set, event_id, own, lacking, lacking.events)
    _look_at_names(change_set, event, lacking)


def _is_ordinary(caches: WriterCaches, one: IncomingEvent) -> bool:
    """Return whether it is a message like one before it.

    Then `storage.persist.plan.fast_path` needs only its parents, and the type of its relation.
    """
    event = one.event
    if event.state_key is not None or one.state_before is not None:
        return False
    return (event.sender, event.type, event.auth_event_ids, event.room_id) in caches.allowed


def _look_at_parents(
    change_set: ChangeSet, event: Event, own: set[str], lacking: BatchRequest
) -> None:
    caches = change_set.caches
    for event_id in event.prev_event_ids:
        row = caches.rows.row(event_id) or change_set.events.rows.get(event_id)
        # Another writer may have given an outlier its position. Such a write leaves no trace here.
        if row is None or row.outlier:
            _want(change_set, event_id, own, lacking, lacking.parents)
        elif row.after not in caches.groups and row.after not in change_set.states.groups:
            lacking.groups.add(row.after)


def _look_at_room(change_set: ChangeSet, room_id: str, lacking: BatchRequest) -> None:
    if room_id in change_set.rooms.known:
        return
    room = change_set.caches.rooms.get(room_id)
    if room is None:
        lacking.rooms.add(room_id)
    elif (
        room.current_state_group is not None
        and room.current_state_group not in change_set.caches.groups
    ):
        lacking.groups.add(room.current_state_group)


def _look_at_relation(change_set: ChangeSet, event: Event, lacking: BatchRequest) -> None:
    relation = relation_of(event)
    if relation is not None:
        _look_at_type(change_set, relation.rel_type, lacking)


def _look_at_type(change_set: ChangeSet, name: str, lacking: BatchRequest) -> None:
    if name not in change_set.caches.names.types and name not in change_set.names.types:
        lacking.types.add(name)


def _want(
    change_set: ChangeSet, event_id: str, own: set[str], lacking: BatchRequest, kind: set[str]
) -> None:
    """Request an event, unless it is cached, in the batch, or known not to be stored."""
    if event_id not in own and event_id not in change_set.events.rows:
        lacking.events.add(event_id)
        kind.add(event_id)


def _look_at_auth_event(
    change_set: ChangeSet, nid: int, lacking: BatchRequest, *, placed: bool
) -> None:
    if nid not in change_set.caches.events and nid not in change_set.events.parsed:
        lacking.contents.add(nid)
    if placed and nid not in change_set.caches.places and nid not in change_set.auth_graph.places:
        lacking.places.add(nid)


def _look_at_names(change_set: ChangeSet, event: Event, lacking: BatchRequest) -> None:
    """Request the sender, its membership key, the type and the state key."""
    names = change_set.caches.names
    if event.sender not in names.principals and event.sender not in change_set.names.principals:
        lacking.principals.add(event.sender)
    if (TYPE_MEMBER, event.sender) not in names.state_keys and (
        TYPE_MEMBER,
        event.sender,
    ) not in change_set.names.state_keys:
        lacking.state_keys.add((MEMBER, event.sender))
    _look_at_type(change_set, event.type, lacking)
    if event.state_key is None:
        return
    type_nid = names.types.get(event.type) or change_set.names.types.get(event.type)
    key = (type_nid, event.state_key)
    if type_nid is None or (key not in names.state_keys and key not in change_set.names.state_keys):
        lacking.state_keys.add((event.type, event.state_key))
    if event.type == MEMBER:
        _look_at_member(change_set, event.room_id, event.state_key, lacking)


def _look_at_member(change_set: ChangeSet, room_id: str, user: str, lacking: BatchRequest) -> None:
    """Request the visibility of the server, of a local member, and of the standing principals."""
    names = change_set.caches.names
    room = change_set.caches.rooms.get(room_id) or change_set.rooms.known.get(room_id)
    server = server_name_of(user)
    for name in (server, *((user,) if server == change_set.server_name else ()), *STANDING):
        nid = (
            STANDING.get(name)
            or names.principals.get(name)
            or change_set.names.principals.get(name)
        )
        if nid is None and name not in change_set.names.principals:
            lacking.principals.add(name)
        if (nid is None and name not in change_set.names.principals) or (
            nid is not None
            and (room is None or not change_set.visibility.knows_visibility(room.room_nid, nid))
        ):
            lacking.seen.add((room_id, name))
