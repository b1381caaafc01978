"""Calls that write events, or change who sees them."""

from collections.abc import Iterable, Mapping
from time import time_ns

from storage import arguments as args
from storage.observability.instrument import measured
from storage.persist import AppendResult, Origin, user_erasure
from storage.persist import append as persist
from storage.persist import readmit as readmission
from storage.persist.given_states import GivenStates
from storage.persist.receive import Pdu, VerifyKeys
from storage.persist.stripped_state import StrippedState
from storage.persist.verdicts import Refused
from storage.store.core import StoreCore


@measured("append")
async def append(
    store: StoreCore,
    pdus: Iterable[Pdu],
    *,
    room_version: str | None = None,
    origin: Origin = "live",
    state_before: GivenStates | None = None,
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
    options = persist.AppendOptions(
        room_version, origin, state_before, stripped_state, verify_keys, refused, room_versions
    )
    with store.reads.writing():
        results = await persist.append(store.database, store.writer, pdus, options)
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
    wanted = args.event(event_id)
    with store.reads.writing():
        return await readmission.readmit(store.database, store.writer, wanted)


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
