"""Calls that write events, or change who sees them."""

from collections.abc import Iterable, Mapping
from time import time_ns
from typing import Any

from signedjson.types import SigningKey

from storage import arguments as args
from storage.errors import InputError
from storage.ids import RoomId, ServerName
from storage.observability.instrument import measured
from storage.persist import AppendResult, Origin, SendResult
from storage.persist import append as appending
from storage.persist import readmit as readmission
from storage.persist import readmit as user_erasure
from storage.persist import send as new_room
from storage.persist import send as persist
from storage.persist.model.incoming import Signer
from storage.persist.receive import Pdu, Refused, StatesBefore, StrippedState, VerifyKeys
from storage.persist.send import InitialEvent
from storage.queries import gaps as partial
from storage.store.core import StoreCore
from storage.streams.defined_streams import DefinedStream

# --------------------------------------------------------------------------------------------------
# Calls that make events of local users.


@measured("send")
async def send(
    store: StoreCore,
    room_id: str,
    sender: str,
    type: str,  # noqa: A002  # the field of the event
    content: Mapping[str, Any],
    *,
    state_key: str | None = None,
    redacts: str | None = None,
    transaction: tuple[str, str] | None = None,
    timestamp_ms: int | None = None,
    signing_key: SigningKey | None = None,
) -> SendResult:
    """Make an event of a local user, store it, and return its id and outcome.

    The engine chooses its parents, depth and auth events, signs it with ``signing_key`` (by default
    that of `storage.open`), and authorises it by the current state of the room. Concurrent sends to
    a room are all stored and leave one forward extremity. ``timestamp_ms`` is by default now.
    With ``state_key`` it is a state event; "" is the key of a room's name, topic and the like. A
    redaction names its target by ``redacts``. It takes effect once the target is stored, and
    without the power to redact others it must be an event of the sender.

    A join by a restricted join rule needs a room that the rule allows. It then gets the local user
    that authorises it, as `join_authorised_via_users_server`.

    ``transaction`` is (device id, transaction id) of the client's request, up to 255 bytes each.
    Sent again by the user to the room, it returns the id of the first event, with the outcome
    "duplicate". The request is the same if type, state key and ``redacts`` are, as the path of the
    request has them; the content does not count. That works after a restart, and if two processes
    get the request at the same moment. `Config.transaction_keep_ms` is how long.

    Nothing is stored if it raises. `AuthDenied`: the room refuses the event. `UnknownRoom`.
    `InvalidIdentifier`: the user is of another server. `InvalidEvent`: the content is too large or
    no canonical JSON. `InputError`: there is no key. `PartialState`: the membership of a user is
    not known yet.
    """
    new = persist.SendRequest(
        args.room(room_id),
        args.local_user(sender, store.server_name),
        type,
        content,
        state_key,
        redacts,
        timestamp_ms,
        None if transaction is None else args.transaction(transaction),
    )
    with store.reads.writing():
        await _refuse_unknown_member(store, new)
        return await persist.send(store.database, store.writer, new, signer_of(store, signing_key))


async def _refuse_unknown_member(store: StoreCore, new: persist.SendRequest) -> None:
    """Raise `PartialState` for a membership that may replace one that this server lacks."""
    if new.type == "m.room.member" and isinstance(new.state_key, str):
        async with store.database.connection() as conn:
            await partial.refuse_unknown_member(conn, new.room_id, new.state_key)


@measured("template")
async def template(
    store: StoreCore,
    room_id: str,
    sender: str,
    type: str,  # noqa: A002  # the field of the event
    content: Mapping[str, Any],
    *,
    state_key: str | None = None,
    redacts: str | None = None,
) -> dict[str, Any]:
    """Return an event as `send` would make it now, without hashes and signatures; store nothing.

    Another server asks for it to join, leave or knock. So the sender may be a user of any server.
    Raise as `send` does.

    Source: server-server API, /make_join, /make_leave, /make_knock; room version 8.
    """
    new = persist.SendRequest(
        args.room(room_id), args.user(sender), type, content, state_key, redacts
    )
    with store.reads.writing():  # it plans the event as `send` does
        await _refuse_unknown_member(store, new)
        return await persist.template(store.database, store.writer, store.server_name, new)


@measured("create_room")
async def create_room(
    store: StoreCore,
    creator: str,
    *,
    room_version: str = "12",
    content: Mapping[str, Any] | None = None,
    initial_state: Iterable[InitialEvent] = (),
    signing_key: SigningKey | None = None,
) -> RoomId:
    """Create a room of a local user, of this ``room_version``, and return its id.

    ``signing_key`` signs the events, by default that of `storage.open`. The room begins with the
    create event, the creator's join and the power levels. ``content`` adds keys to the create
    event. The events of ``initial_state`` follow in their order: type, state key and content each,
    such as ``("m.room.join_rules", "", {"join_rule": "public"})``. Without join rules users have to
    be invited. Power levels among them replace the default ones. All are stored in one transaction.

    Raise `AuthDenied` if an event is refused by the state before it, `UnknownRoomVersion`,
    `InvalidIdentifier`, `InvalidEvent` or `InputError`. Nothing is stored then.
    """
    request = new_room.NewRoom(
        args.local_user(creator, store.server_name),
        args.text(room_version),
        {} if content is None else args.mapping(content, "content"),
        [_initial_event(event) for event in args.listed(initial_state, "initial_state")],
    )
    with store.reads.writing():
        return await new_room.create_room(
            store.database, store.writer, request, signer_of(store, signing_key)
        )


def _initial_event(triple: Any) -> InitialEvent:
    """Return type, state key and content; raise `InputError` for another value."""
    if not isinstance(triple, tuple | list) or len(triple) != 3:
        raise InputError(f"initial_state has {triple!r}: write (type, state_key, content)")
    return args.text(triple[0]), args.text(triple[1]), args.mapping(triple[2], "the content")


def signer_of(store: StoreCore, signing_key: SigningKey | None) -> Signer:
    """Return the server and the key that signs its events. Raise `InputError` without a key."""
    key = store.signing_key if signing_key is None else signing_key
    if key is None:
        raise InputError("there is no signing key: give it to storage.open or to this call")
    return Signer(ServerName(store.server_name), args.signing_key(key))


@measured("append")
async def append(
    store: StoreCore,
    pdus: Iterable[Pdu],
    *,
    room_version: str | None = None,
    origin: Origin = "live",
    state_before: StatesBefore | None = None,
    stripped_state: StrippedState | None = None,
    verify_keys: VerifyKeys | None = None,
    refused: Refused | None = None,
    room_versions: Mapping[str, str] | None = None,
) -> list[AppendResult]:
    """Store PDUs, and return one result for each, in their order.

    A bad PDU is an outcome and does not fail the others. A bad argument is an `InputError`.

    A PDU is the received JSON as bytes, or a dict. ``room_version`` is for a room that is not
    stored yet, if its create event is not among the PDUs. ``room_versions``, by room id, stand
    before what create events say: name a room there if you know its version, because its members
    can send create events that say anything. A stored room keeps its version.

    ``origin`` says how the PDUs came: "live" as new events, "backfill" as history below a gap,
    "outlier" as state or auth events without a position in the room. With "out_of_band" they are
    memberships of local users in rooms that this server is not in, such as invites. Then
    ``stripped_state`` has the stripped state events of each, by event id.

    ``state_before`` has the event ids of the state before an event whose parents are missing, by
    event id.

    A create event of a room that is not stored yet makes the room, as joins and imports need it.
    So give the PDUs of another server's transaction to `storage.federation.Receiver.transaction`,
    which refuses those of rooms that this server is not in.

    ``verify_keys`` is a mapping from (server name, key id) to a verify key, or an async function
    of both. Each server that must sign needs one valid signature by a key that it returns. So an
    empty mapping makes every event invalid. None, the default, checks no signatures.

    ``refused`` has your own verdicts, such as those of a policy server: event id and reason, up to
    500 characters. A live or backfilled event that would be accepted is stored as "soft_failed"
    with that reason. Rejected events stay rejected, and a duplicate is not changed. `readmit` lifts
    the verdict.
    """
    options = appending.AppendOptions(
        room_version, origin, state_before, stripped_state, verify_keys, refused, room_versions
    )
    with store.reads.writing():
        results = await appending.append(store.database, store.writer, pdus, options)
    store.measures.append_events.add(len(results))
    store.measures.outcomes.update(result.outcome for result in results)
    return results


@measured("readmit")
async def readmit(store: StoreCore, event_id: str) -> AppendResult:
    """Accept an event that was refused by ``refused`` of `append`, at a new stream position.

    It keeps its topological position. From now on it is in sync, in pages and in the state, as if
    it arrived now; it becomes a forward extremity unless an accepted event descends from it.
    Redactions take effect. An event that is accepted already is a "duplicate", also if another
    process has just readmitted it.

    Raise `UnknownEvent`, `InvalidIdentifier`, and `InputError` for an event that is an outlier, or
    that the auth rules refuse.
    """
    target = args.event(event_id)
    with store.reads.writing():
        return await readmission.readmit(store.database, store.writer, target)


async def erase_user(store: StoreCore, user_id: str) -> None:
    """Redact a user's events from now on for users and servers that were not in the room then.

    `InvalidIdentifier`.
    """
    user = args.user(user_id)
    with store.reads.writing():
        async with store.database.connection() as conn:
            await user_erasure.erase_user(conn, user, time_ns() // 1_000_000)


async def restore_user(store: StoreCore, user_id: str) -> None:
    """Take `erase_user` back. It does nothing for a user who is not erased. `InvalidIdentifier`."""
    user = args.user(user_id)
    with store.reads.writing():
        async with store.database.connection() as conn:
            await user_erasure.restore_user(conn, user)


# --------------------------------------------------------------------------------------------------
# Calls for the homeserver's own facts: streams that it defines.


def define_stream(store: StoreCore, name: str, *, keep_ms: int | None = None) -> DefinedStream:
    """Define a stream of the homeserver's own facts, such as "typing"; call it once at start.

    A name has 1 to 40 of a-z, 0-9, "_", "." and "-". From now on the tokens of `Store.sync` have
    the position of the stream, and its facts wake waiting syncs. Define a stream in each process
    that serves /sync. No ``await`` is needed: the first use enters the stream as a writer. Await
    the result to do that at once.

    ``keep_ms`` is how long facts are kept at least; None: the latest of each key for ever. A second
    call changes ``keep_ms`` alone. `InputError`.
    """
    return store.defined_streams.define(name, keep_ms)


def stream(store: StoreCore, name: str) -> DefinedStream:
    """Return a stream that this process has defined. `UnknownStream`."""
    return store.defined_streams.named(name)
