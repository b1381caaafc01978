"""The sentence of each case that an operator asks about, compared with what the store returns."""

import pytest

import storage
from storage import Store, UserId
from storage.queries.gaps import PartialRoom
from storage.testing import BuiltEvent, RoomBuilder
from tests.maintenance.rooms import SERVER

ADMIN, LATER, LEFT, BANNED = (
    UserId(f"@{name}:{SERVER}") for name in ("admin", "later", "left", "banned")
)
INVITED, NEVER, TROLL = (f"@{name}:{SERVER}" for name in ("invited", "never", "troll"))
GUEST_SERVER = "s2.test"


class Case:
    """A room of one history visibility, and a message that everybody is asked about."""

    def __init__(self, visibility: str, seed: int) -> None:
        self.room = room = RoomBuilder("11", seed=seed, checked=False)
        room.start(ADMIN, history_visibility=visibility, users={ADMIN: 100})
        for user in (LEFT, BANNED, TROLL):
            room.join(user)
        room.leave(LEFT)
        room.ban(ADMIN, BANNED)
        room.invite(ADMIN, INVITED)
        self.event = room.message(TROLL, "the message")
        self.join = room.join(LATER)

    async def sentence(self, store: Store, reader: str, event: BuiltEvent | None = None) -> str:
        """The sentence, after its answer was compared with that of the store."""
        event_id = (event or self.event).event_id
        is_user = reader.startswith("@")
        visible = await (store.visible_to_user if is_user else store.visible_to_server)(
            reader, [event_id]
        )
        explained = await store.explain_visibility(event_id, reader)
        assert explained.visible == (event_id in visible), explained
        assert "table says otherwise" not in explained.sentence
        may = "may see" if explained.visible else "may not see"
        beginning = f"{reader} {may} {event_id}: "
        unknown = f" No event by or about {reader} is stored here: check the spelling."
        assert explained.sentence.startswith(beginning)
        assert explained.sentence.endswith(unknown) != explained.known
        assert explained.known or reader == NEVER
        return explained.sentence.removeprefix(beginning).removesuffix(unknown)


@pytest.mark.parametrize(
    "visibility, later, others",
    [
        ("shared", True, ", and they never joined later"),
        ("invited", False, ""),
        ("joined", False, ""),
        ("world_readable", True, None),
    ],
)
async def test_a_reader_by_membership(
    store: Store, visibility: str, *, later: bool, others: str | None
) -> None:
    case = Case(visibility, seed=1)
    await store.append(case.room.pdus)
    was = f"the history visibility was {visibility}"

    def expected(membership: str) -> str:
        return f"{was}." if others is None else f"{was}, and they were {membership}{others}."

    assert await case.sentence(store, NEVER) == expected("not members")
    assert not (await store.explain_visibility(case.event.event_id, NEVER)).known
    assert await case.sentence(store, LEFT) == expected("gone")
    assert await case.sentence(store, BANNED) == expected("banned")
    if visibility == "invited":
        assert await case.sentence(store, INVITED) == f"{was}, and they were invited."
    else:
        assert await case.sentence(store, INVITED) == expected("invited")
    said = await case.sentence(store, LATER)
    if visibility == "shared":
        assert said == f"{was}, and they are joined now."
        case.room.leave(LATER)
        await store.append(case.room.pdus)
        join_id = case.join.event_id
        assert await case.sentence(store, LATER) == f"{was}, and they joined later ({join_id})."
    else:
        assert said == expected("not members")
    assert (await store.explain_visibility(case.event.event_id, LATER)).visible is later


async def test_flags_hide_an_event_from_everybody(store: Store) -> None:
    case = Case("world_readable", seed=2)
    room = case.room
    rejected = room.message(NEVER, "not a member", expected="rejected")
    refused = room.message(TROLL, "spam")
    await store.append([one.pdu for one in room.events if one is not refused])
    await store.append([refused.pdu], refused={refused.event_id: "the policy server: spam"})
    assert (await case.sentence(store, ADMIN, rejected)).startswith("it was rejected (")
    assert await case.sentence(store, ADMIN, refused) == (
        "this server refused it (the policy server: spam), though the rules accept it."
    )
    await store.readmit(refused.event_id)
    assert (
        await case.sentence(store, ADMIN, refused) == "the history visibility was world_readable."
    )


async def test_an_event_that_the_current_state_refuses(store: Store) -> None:
    case = Case("shared", seed=3)
    room = case.room
    stay, gone = room.fork(2)
    gone.ban(ADMIN, TROLL)
    late = stay.message(TROLL, "sent before the ban was known", expected="soft_failed")
    for event in room.events:
        await store.append([event.pdu])
    assert (await store.events([late.event_id]))[late.event_id].soft_failed
    assert await case.sentence(store, ADMIN, late) == (
        "it was soft-failed: when it arrived, the current state of the room did not allow it."
    )


async def test_an_outlier(store: Store) -> None:
    case = Case("shared", seed=4)
    other = RoomBuilder("11", seed=5)
    other.start(ADMIN)
    await store.append(case.room.pdus)
    await store.append(other.pdus, origin="outlier")
    outlier = other.events[-1]
    assert (await store.events([outlier.event_id]))[outlier.event_id].outlier
    assert await case.sentence(store, ADMIN, outlier) == (
        "it is an outlier, which has no position in the room."
    )


async def test_what_is_left_of_a_visible_event(store: Store) -> None:
    case = Case("shared", seed=6)
    room = case.room
    redacted = room.message(ADMIN, "secret")
    redaction = room.redact(ADMIN, redacted)
    await store.append(room.pdus)
    assert await case.sentence(store, ADMIN, redacted) == (
        f"they were joined. Its content is reduced by the redaction {redaction.event_id}."
    )
    await store.account_data.set(
        ADMIN, "m.ignored_user_list", {"ignored_users": {TROLL: {}, NEVER: {}}}
    )
    assert await case.sentence(store, ADMIN) == (
        f"they were joined. But they ignore {TROLL}, so their clients do not get it."
    )
    explained = await store.explain_visibility(case.event.event_id, ADMIN)
    assert explained.ignored
    state = next(event for event in room.events if event.state_key == TROLL)
    assert await case.sentence(store, ADMIN, state) == "they were joined."  # state is always shown
    await store.erase_user(TROLL)
    assert (await case.sentence(store, LATER)).endswith(
        f"they are joined now. {TROLL} is erased and they were not joined, "
        "so the content is left out."
    )
    assert "erased" not in await case.sentence(store, ADMIN)


@pytest.mark.parametrize("listed", [None, [], {"ignored_users": None}, {"ignored_users": ["@x"]}])
async def test_a_malformed_list_of_ignored_users(store: Store, listed: object) -> None:
    case = Case("shared", seed=7)
    await store.append(case.room.pdus)
    if isinstance(listed, dict):
        await store.account_data.set(ADMIN, "m.ignored_user_list", listed)
    assert await case.sentence(store, ADMIN) == "they were joined."


async def test_a_room_with_a_partial_state(store: Store) -> None:
    """The row of a partial join is written by hand; tests/federation joins partially."""
    case = Case("shared", seed=8)
    case.room.join(f"@guest:{GUEST_SERVER}")
    message = case.room.message(ADMIN, "later")
    await store.append(case.room.pdus)
    assert await case.sentence(store, GUEST_SERVER, message) == "the server's users were joined."
    async with store.database.connection() as conn:
        await conn.execute(
            "INSERT INTO partial_rooms SELECT 1, room_nid, $2, 's2.test', '{}' FROM rooms"
            " WHERE room_id = $1",
            case.room.room_id,
            case.event.event_id,
        )
    rooms = await store.partial_rooms()
    assert [type(one) for one in rooms] == [PartialRoom]
    assert await case.sentence(store, GUEST_SERVER, message) == (
        "the members of the room are not all known yet, so no server gets its events."
    )
    assert (await case.sentence(store, NEVER, message)).endswith(
        "never joined later. That is as far as members are known: the room has a partial state."
    )
    assert await case.sentence(store, ADMIN, message) == "they were joined."
    early = case.room.events[0]
    assert "as far as" not in await case.sentence(store, NEVER, early)


async def test_a_room_that_was_forgotten(store: Store) -> None:
    case = Case("shared", seed=9)
    before = case.room.events[-3]
    await store.append(case.room.pdus)
    await store.forget(LEFT, case.room.room_id)
    join = next(event for event in case.room.events if event.state_key == LEFT)
    assert await case.sentence(store, LEFT, join) == "they have forgotten the room."
    with pytest.raises(storage.InvalidIdentifier):
        await store.explain_visibility(before.event_id, "@left:elsewhere.test")


async def test_a_join_that_the_table_does_not_know(store: Store) -> None:
    """It is found among the events, for a user and for a server."""
    case = Case("shared", seed=10)
    case.room.leave(LATER)
    case.room.join(f"@guest:{GUEST_SERVER}")
    case.room.leave(f"@guest:{GUEST_SERVER}")
    last = case.room.message(ADMIN, "the last one")
    await store.append(case.room.pdus)
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE visibility SET audiences = '{}', last_join_topological = NULL"
            " WHERE principal_nid > 2"
        )
    explained = await store.explain_visibility(case.event.event_id, LATER)
    assert f"they joined later ({case.join.event_id})" in explained.sentence
    assert "table says otherwise" in explained.sentence
    explained = await store.explain_visibility(last.event_id, GUEST_SERVER)
    assert "which is for every server in the room" in explained.sentence
    assert "table says otherwise" in explained.sentence
