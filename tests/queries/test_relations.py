"""Relations to an event: which events, in which order, by pages, direct and indirect.

Also events that are no relation.
"""

from functools import partial
from typing import Any

import pytest

from storage import Store
from storage.errors import InputError, InvalidIdentifier, InvalidToken, UnknownEvent
from storage.event.model import target_key
from storage.ids import EventId, UserId
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, ids, new_room


def relate(
    room: RoomBuilder,
    sender: str,
    target: BuiltEvent | str,
    rel_type: Any = "m.reference",
    **how: Any,
) -> BuiltEvent:
    """A message that relates to another event somehow."""
    event_id = target if isinstance(target, str) else target.event_id
    content = {"body": "*", "m.relates_to": {"rel_type": rel_type, "event_id": event_id}}
    return room.send(sender, how.pop("type_", "m.room.message"), content, **how)


async def related(
    store: Store, target: BuiltEvent, user: str = LOCAL, **asked: Any
) -> list[EventId]:
    """The whole answer, oldest first."""
    return ids(
        (await store.relations(target.event_id, user, direction="f", limit=1000, **asked)).chunk
    )


async def test_each_kind_in_the_order_of_pages(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    edit = room.edit(ADMIN, root, "better")
    reply = room.threaded(LOCAL, root, "why?")
    room.reply(LOCAL, root, "a rich reply is no relation")
    reaction = room.react(LOCAL, root)
    reference = relate(room, ADMIN, root)
    own = relate(room, ADMIN, root, "org.example.own")
    await deliver(store, room)
    everything = ids([edit, reply, reaction, reference, own])
    assert await related(store, root) == everything
    statements.take()
    page = await store.relations(root.event_id, LOCAL)
    assert len(statements.take()) == 1
    assert (ids(page.chunk), page.end, page.gaps, page.recursion_depth) == (
        everything[::-1],
        None,
        [],
        None,
    )
    for rel_type, expected in (
        ("m.replace", edit),
        ("m.thread", reply),
        ("m.annotation", reaction),
        ("m.reference", reference),
    ):
        assert await related(store, root, rel_type=rel_type) == [expected.event_id]
    assert await related(store, root, rel_type="org.example.own") == [own.event_id]
    assert await related(store, root, event_type="m.reaction") == [reaction.event_id]
    assert await related(store, root, rel_type="m.annotation", event_type="m.room.message") == []
    assert await related(store, root, rel_type="never.heard.of") == []
    assert await related(store, edit) == []


async def test_pages_join_without_holes(store: Store) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    events = []
    for number in range(23):
        room.message(ADMIN)
        events.append(
            relate(room, LOCAL, root, ("m.thread", "m.reference", f"kind.{number}")[number % 3])
        )
    await deliver(store, room)
    for direction, expected in (("b", ids(events)[::-1]), ("f", ids(events))):
        for recurse in (False, True):
            found: list[EventId] = []
            at = None
            while True:
                page = await store.relations(
                    root.event_id,
                    LOCAL,
                    from_=at,
                    direction=direction,  # type: ignore[arg-type]
                    limit=4,
                    recurse=recurse,
                )
                found += ids(page.chunk)
                at = page.end
                if at is None:
                    break
                assert len(page.chunk) == 4
            assert found == expected


async def test_tokens_of_other_reads(store: Store) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    early = [relate(room, LOCAL, root) for _ in range(3)]
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    middle = (await store.messages(room.room_id, LOCAL, limit=1)).end
    late = [relate(room, LOCAL, root) for _ in range(3)]
    await deliver(store, room)
    for recurse in (False, True):
        assert (
            ids((await store.relations(root.event_id, LOCAL, from_=since, recurse=recurse)).chunk)
            == ids(early)[::-1]
        )
        assert (
            ids((await store.relations(root.event_id, LOCAL, to=since, recurse=recurse)).chunk)
            == ids(late)[::-1]
        )
        forwards = await store.relations(
            root.event_id, LOCAL, from_=since, direction="f", recurse=recurse
        )
        assert ids(forwards.chunk) == ids(late)
        assert (
            ids((await store.relations(root.event_id, LOCAL, from_=middle, recurse=recurse)).chunk)
            == ids(early[:2])[::-1]
        )
    with pytest.raises(InvalidToken):
        await store.relations(root.event_id, LOCAL, from_="nonsense")


@pytest.mark.parametrize("recurse", [False, True])
async def test_a_walk_from_a_sync_token_leaves_out_what_the_token_covers_on_every_page(
    store: Store, recurse: bool
) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    short = room.fork(1)[0]
    old = [relate(room, LOCAL, root) for _ in range(4)]
    await deliver(store, room)
    token = (await store.sync(LOCAL)).next_batch
    new = [relate(short, LOCAL, root) for _ in range(3)]
    await deliver(store, room)
    walk = partial(store.relations, root.event_id, LOCAL, limit=1, recurse=recurse)
    found: list[EventId] = []
    at: str | None = token
    while at is not None:
        page = await walk(from_=at, direction="f")
        found += ids(page.chunk)
        at = page.end
        if at is not None:
            assert ids((await walk(to=at, limit=100)).chunk) == ids(new)[len(found) :][::-1]
    assert found == ids(new)
    assert not set(found) & set(ids(old))


async def test_indirect_relations_down_to_three_levels(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    reply = room.threaded(LOCAL, root, "one")
    reaction = room.react(ADMIN, reply)
    third = relate(room, ADMIN, reaction)
    fourth = relate(room, ADMIN, third)
    edit = room.edit(ADMIN, root, "two")
    await deliver(store, room)
    statements.take()
    page = await store.relations(root.event_id, LOCAL, recurse=True)
    assert len(statements.take()) == 1
    assert ids(page.chunk) == ids([edit, third, reaction, reply])
    assert page.recursion_depth == 3
    assert await related(store, reply, recurse=True) == ids([reaction, third, fourth])
    assert await related(store, root, recurse=True, rel_type="m.annotation") == []
    assert await related(store, reply, recurse=True, event_type="m.reaction") == [reaction.event_id]
    first = await store.relations(root.event_id, LOCAL, recurse=True, limit=1)
    assert ids(first.chunk) == [edit.event_id]
    second = await store.relations(root.event_id, LOCAL, recurse=True, limit=2, from_=first.end)
    assert ids(second.chunk) == ids([third, reaction])


async def test_a_redacted_event_relates_to_nothing(store: Store) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    reply = room.threaded(LOCAL, root, "one")
    reaction = room.react(ADMIN, reply)
    await deliver(store, room)
    assert await related(store, root, recurse=True) == ids([reply, reaction])
    room.redact(LOCAL, reply)
    await deliver(store, room)
    assert await related(store, root) == []
    assert await related(store, root, recurse=True) == []
    assert await related(store, reply) == [reaction.event_id]  # that of a redacted event stands


async def test_limits_are_exact_under_visibility(store: Store) -> None:
    room = new_room(visibility="joined", members=[LOCAL, OTHER])
    root = room.message(ADMIN)
    before = [relate(room, OTHER, root) for _ in range(3)]
    room.leave(LOCAL)
    hidden = [relate(room, OTHER, root) for _ in range(10)]
    beneath = relate(room, OTHER, hidden[0], "m.annotation")
    room.join(LOCAL)
    after = [relate(room, OTHER, root) for _ in range(3)]
    shown = relate(room, OTHER, hidden[0], "m.annotation")
    await deliver(store, room)
    page = await store.relations(root.event_id, LOCAL, limit=4)
    assert ids(page.chunk) == ids([*after[::-1], before[2]])
    assert page.end is not None
    assert await related(store, root) == ids([*before, *after])
    assert await related(store, root, recurse=True) == ids([*before, *after])
    assert await related(store, root, OTHER, recurse=True) == ids(
        [*before, *hidden, beneath, *after, shown]
    )
    for event in (hidden[0], beneath):
        with pytest.raises(UnknownEvent):
            await store.relations(event.event_id, LOCAL)


async def test_senders_who_are_ignored_or_erased(store: Store) -> None:
    room = new_room(members=[OTHER])
    root = room.message(ADMIN)
    early = relate(room, OTHER, root)
    room.join(LOCAL)
    late = relate(room, OTHER, root)
    mine = relate(room, LOCAL, late)
    await deliver(store, room)
    assert await related(store, root, recurse=True) == ids([early, late, mine])
    assert await related(store, root, recurse=True, ignored=[UserId(OTHER)]) == []
    assert await related(store, root, ignored=[UserId(OTHER)]) == []
    await store.erase_user(OTHER)
    for recurse in (False, True):
        assert await related(store, root, recurse=recurse) == ids(
            [late, mine] if recurse else [late]
        )
        assert await related(store, root, ADMIN, recurse=recurse) == ids(
            [early, late, mine] if recurse else [early, late]
        )


async def test_what_comes_before_its_target(store: Store) -> None:
    """The target is unknown, then an outlier, then history: the relation stays and names no gap."""
    room = new_room(members=[LOCAL])
    side = room.fork(1)[0]
    target = side.message(ADMIN)
    reaction = room.react(LOCAL, target)
    nowhere = room.react(LOCAL, "$" + "n" * 43)
    await append(store, *[event for event in room.events if event is not target])
    assert await store.backward_extremities(room.room_id) == set()
    with pytest.raises(UnknownEvent):
        await store.relations(target.event_id, LOCAL)
    with pytest.raises(UnknownEvent):
        await store.relations("$" + "n" * 43, LOCAL)
    assert await append(store, target, origin="outlier") == ["stored"]
    with pytest.raises(UnknownEvent):
        await store.relations(target.event_id, LOCAL)
    assert await append(store, target, origin="backfill") == ["stored"]
    assert await related(store, target) == [reaction.event_id]
    assert (await store.events([nowhere.event_id]))[nowhere.event_id].rejected is None


async def test_an_outlier_relates_once_it_is_in_the_timeline(store: Store) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    reaction = room.react(LOCAL, root)
    edit = room.edit(ADMIN, root, "two")
    await append(store, *[event for event in room.events if event not in (reaction, edit)])
    await append(store, reaction, edit, origin="outlier")
    assert await related(store, root) == []
    await append(store, reaction)
    assert await related(store, root) == [reaction.event_id]
    await append(store, edit, origin="backfill")
    assert await related(store, root) == ids([reaction, edit])


async def test_what_is_not_accepted_relates_to_nothing(store: Store) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    root = room.message(ADMIN)
    side = room.fork(1)[0]
    room.ban(ADMIN, REMOTE)
    refused = relate(room, REMOTE, root, expected="rejected")
    late = relate(side, REMOTE, root)
    assert await append(store, *[event for event in room.events if event is not late]) == [
        "stored"
    ] * (len(room.events) - 2) + ["rejected"]
    assert await append(store, late) == ["soft_failed"]
    assert refused.event_id != late.event_id
    for recurse in (False, True):
        assert await related(store, root, recurse=recurse) == []
        assert await related(store, root, ADMIN, recurse=recurse) == []


async def test_what_has_a_wrong_content_hash_relates_to_nothing(store: Store) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    damaged = relate(room, ADMIN, root, damage="content_hash")
    assert await append(store, *room.events) == ["stored"] * (len(room.events) - 1) + ["redacted"]
    assert await related(store, root) == []
    assert await store.visible_to_user(LOCAL, [damaged.event_id]) == {damaged.event_id}


async def test_targets_have_the_same_key_in_both_places(store: Store) -> None:
    found = ["$", "$x:s1.test", "$" + "ü" * 100, "$😀"]
    async with store.database.connection() as conn:
        assert await conn.fetchvals(
            "SELECT relation_key(i) FROM unnest($1::text[]) AS i", found
        ) == [target_key(one) for one in found]


async def test_rooms_are_apart(store: Store) -> None:
    room, other = new_room(members=[LOCAL]), new_room(seed=1, members=[LOCAL])
    root = room.message(ADMIN)
    across = relate(other, ADMIN, root)
    within = relate(other, ADMIN, across)
    await deliver(store, room)
    await deliver(store, other)
    for recurse in (False, True):
        assert await related(store, root, recurse=recurse) == []
    assert await related(store, across) == [within.event_id]


@pytest.mark.parametrize(
    "relates_to",
    [
        None,
        "m.thread",
        [],
        {},
        {"rel_type": "m.thread"},
        {"event_id": "$target"},
        {"rel_type": 7, "event_id": "$target"},
        {"rel_type": "m.thread", "event_id": ["$target"]},
        {"rel_type": "", "event_id": "$target"},
        {"rel_type": "m.thread", "event_id": ""},
        {"rel_type": "m.thread", "event_id": "no id"},
        {"rel_type": "m.th\0read", "event_id": "$target"},
        {"rel_type": "m.thread", "event_id": "$target\0"},
        {"rel_type": "t" * 256, "event_id": "$target"},
        {"rel_type": "m.thread", "event_id": "$" + "t" * 255},
        {"m.in_reply_to": {"event_id": "$target"}},
    ],
)
async def test_what_has_not_the_form_of_a_relation(store: Store, relates_to: Any) -> None:
    room = new_room(members=[LOCAL])
    target = room.message(ADMIN)
    if isinstance(relates_to, dict) and str(relates_to.get("event_id", "")).startswith("$target"):
        relates_to = {
            **relates_to,
            "event_id": str(relates_to["event_id"]).replace("$target", target.event_id),
        }
    strange = room.send(ADMIN, "m.room.message", {"body": "?", "m.relates_to": relates_to})
    await deliver(store, room)
    assert await related(store, target) == []
    assert [
        event.event_id for event in (await store.messages(room.room_id, LOCAL, limit=1)).chunk
    ] == [strange.event_id]


async def test_longest_names_and_encrypted_events(store: Store) -> None:
    room = new_room(members=[LOCAL])
    target = room.send(ADMIN, "m.room.encrypted", {"ciphertext": "…"})
    longest = relate(room, ADMIN, target, "t" * 255)
    secret = relate(room, ADMIN, target, "m.thread", type_="m.room.encrypted")
    profile = room.send(
        LOCAL,
        "m.room.member",
        {"membership": "join", **relate(room, ADMIN, target).content},
        state_key=LOCAL,
    )
    await deliver(store, room)
    assert await related(store, target, rel_type="t" * 255) == [longest.event_id]
    assert await related(store, target, rel_type="m.thread", event_type="m.room.encrypted") == [
        secret.event_id
    ]
    assert profile.event_id in await related(store, target)


async def test_many_types_of_relations_cost_an_append_no_statement_each(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    await deliver(store, room)
    plain = [relate(room, LOCAL, root) for _ in range(40)]
    statements.take()
    counted = len([statement for _, statement in await _sent(store, statements, plain)])
    strange = [relate(room, LOCAL, root, f"kind.{number}") for number in range(40)]
    assert (
        len(await _sent(store, statements, strange)) <= counted + 40 // 10 + 3
    )  # numbers of types come in tens
    assert await related(store, root) == ids([*plain, *strange])


async def _sent(
    store: Store, statements: StatementLog, events: list[BuiltEvent]
) -> list[tuple[object, str]]:
    """Every statement that an append takes, whichever task sends it."""
    statements.sent = []
    await append(store, *events)
    return [one for one in statements.sent if not one[1].startswith(("BEGIN", "COMMIT"))]


async def test_arguments(store: Store) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    relate(room, ADMIN, root)
    await deliver(store, room)
    nothing = await store.relations(root.event_id, LOCAL, limit=0)
    assert (nothing.chunk, nothing.end) == ([], nothing.start)
    assert len((await store.relations(root.event_id, LOCAL, limit=10**6)).chunk) == 1
    for wrong in ({"limit": -1}, {"direction": "up"}, {"rel_type": "\0"}, {"event_type": "m\0"}):
        with pytest.raises(InputError):
            await store.relations(root.event_id, LOCAL, **wrong)
    with pytest.raises(InvalidIdentifier):
        await store.relations("no id", LOCAL)
    with pytest.raises(InvalidIdentifier):
        await store.relations(root.event_id, "@someone:else.test")
    with pytest.raises(UnknownEvent):
        await store.relations(root.event_id, "@nobody:s1.test")


async def test_a_walk_reads_no_more_than_it_may(dsn: str) -> None:
    import storage  # noqa: PLC0415

    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    events = [relate(room, LOCAL, root) for _ in range(10)]
    async with storage.open(
        dsn, server_name="s1.test", config=storage.Config(traversal_rows_max=6)
    ) as store:
        await deliver(store, room)
        assert await related(store, root, recurse=True) == ids(events[:5])
        assert await related(store, root) == ids(events)


async def test_a_circle_of_relations_ends(store: Store) -> None:
    """Chosen event ids, which versions 1 and 2 allow, can relate to each other."""
    room = new_room(members=[LOCAL], version="1")
    first = relate(room, ADMIN, "$two:s1.test", extra={"event_id": "$one:s1.test"})
    second = relate(room, ADMIN, "$one:s1.test", extra={"event_id": "$two:s1.test"})
    itself = relate(room, ADMIN, "$self:s1.test", extra={"event_id": "$self:s1.test"})
    await deliver(store, room)
    assert await related(store, first, recurse=True) == [second.event_id]
    assert await related(store, second, recurse=True) == [first.event_id]
    assert await related(store, itself, recurse=True) == []
