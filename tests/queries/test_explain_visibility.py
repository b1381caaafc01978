"""Explanations: the right answer for everybody and everything, and the reason in words."""

import pytest

import storage
from storage import Store
from storage.testing import Odd, RoomBuilder, build_room, deliver_with_gap
from tests.maintenance.rooms import LIVELY, SERVER, deliver


async def test_the_answer_is_that_of_the_table(store: Store) -> None:
    room = build_room(
        LIVELY.replaced(odd=Odd(rejected=0.05, soft_failed=0.05)), 120, seed=1, sign=False
    )
    delivery = deliver_with_gap(room, 40, 60)
    await deliver(store, delivery)
    ids = [event.event_id for event in room.events][::3]
    users = sorted({event.sender for event in room.events if event.sender.endswith(f":{SERVER}")})[
        :4
    ]
    for whom in [*users, f"@nobody:{SERVER}", "s2.test", "elsewhere.test"]:
        ask = store.visible_to_user if whom.startswith("@") else store.visible_to_server
        seen = await ask(whom, ids)
        for event_id in ids:
            explanation = await store.explain_visibility(event_id, whom)
            assert explanation.visible == (event_id in seen), explanation
            assert "table says otherwise" not in explanation.sentence


async def test_the_reasons(store: Store) -> None:
    room = RoomBuilder("11", seed=1, checked=False)
    admin, other, guest = "@admin:s1.test", "@other:s1.test", "@guest:s1.test"
    room.start(admin, history_visibility="shared", users={admin: 100})
    early = room.message(admin, "early")
    room.join(other)
    room.leave(other)
    late = room.message(admin, "late")
    room.join("@visitor:elsewhere.test")
    room.leave("@visitor:elsewhere.test")
    room.history_visibility(admin, "invited")
    room.invite(admin, guest)
    hidden = room.message(admin, "for the invited")
    opening = room.history_visibility(admin, "world_readable")
    rejected = room.message(guest, "not joined", expected="rejected")
    redacted = room.message(admin, "secret")
    redaction = room.redact(admin, redacted)
    await store.append(room.pdus)

    async def said(event: object, whom: str) -> str:
        event_id = event.event_id  # type: ignore[attr-defined]
        return (await store.explain_visibility(event_id, whom)).sentence

    join = next(event for event in room.events if event.state_key == other)
    shared = "the history visibility was shared"
    assert await said(early, admin) == f"{admin} may see {early.event_id}: they were joined."
    assert (
        await said(early, other)
        == f"{other} may see {early.event_id}: {shared}, and they joined later ({join.event_id})."
    )
    assert (await said(late, other)).endswith(
        f": {shared}, and they were gone, and they never joined later."
    )
    assert (await said(late, guest)).endswith(
        f": {shared}, and they were not members, and they never joined later."
    )
    assert (await said(hidden, guest)).endswith(
        ": the history visibility was invited, and they were invited."
    )
    assert (await said(hidden, other)).startswith(
        f"{other} may not see {hidden.event_id}: "
        "the history visibility was invited, and they were gone"
    )
    assert (await said(opening, other)).endswith(
        ": the history visibility was invited before it and world_readable after it."
    )
    assert "it was rejected (sender.not_joined" in await said(rejected, admin)
    assert (await said(redacted, admin)).endswith(
        f"Its content is reduced by the redaction {redaction.event_id}."
    )
    assert (await said(hidden, "elsewhere.test")).endswith(
        "and the server's users were gone. It gets the redacted form."
    )
    assert (await said(early, "elsewhere.test")).endswith(
        f": {shared}, which is for every server in the room."
    )
    assert (await said(early, "nowhere.test")).endswith(
        f": {shared}, and the server was never joined to the room."
        " No stored room has had a member of nowhere.test: check the spelling."
    )


async def test_a_table_that_says_otherwise(store: Store) -> None:
    room = RoomBuilder("11", seed=1)
    room.start("@admin:s1.test")
    await store.append(room.pdus)
    async with store.database.connection() as conn:
        await conn.execute("UPDATE visibility SET audiences = '{}'")
    explanation = await store.explain_visibility(room.events[-1].event_id, "@admin:s1.test")
    assert explanation.visible
    assert "run `room-storage verify --repair`" in explanation.sentence


async def test_unknown_and_malformed(store: Store) -> None:
    with pytest.raises(storage.UnknownEvent):
        await store.explain_visibility("$nothing", "@admin:s1.test")
    for event_id, whom in (
        ("nothing", "@admin:s1.test"),
        ("$x", "@admin:s2.test"),
        ("$x", "@admin"),
        ("$x", "!room"),
        ("$x", "@nul\0:s1.test"),
        ("$x", 7),
    ):
        with pytest.raises(storage.InvalidIdentifier):
            await store.explain_visibility(event_id, whom)  # type: ignore[arg-type]


async def test_a_name_without_a_server_is_no_user(store: Store) -> None:
    """A server may have a name without a dot, but then it is in a room."""
    room = RoomBuilder("11", seed=1)
    room.start("@admin:s1.test")
    room.join("@guest:synapse")
    await store.append(room.pdus)
    last = room.events[-1].event_id
    with pytest.raises(storage.InvalidIdentifier) as refused:
        await store.explain_visibility(last, "bob")
    assert str(refused.value) == (
        "'bob': no server of this name is known here; a user id is @localpart:server"
    )
    for server in ("synapse", "unknown:8448", "unknown.test"):
        explained = await store.explain_visibility(last, server)
        assert explained.principal == server
