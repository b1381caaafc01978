"""Bundled aggregations: the latest valid edit, threads, references, and their readers."""

from typing import Any

import pytest

from storage import Aggregations, Store, StoredEvent
from storage.errors import InvalidIdentifier
from storage.ids import UserId
from storage.testing import BuiltEvent
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, deliver, ids, new_room
from tests.queries.test_relations import relate


async def told(store: Store, event: BuiltEvent, user: str = LOCAL, **how: Any) -> Aggregations:
    """Return the aggregations of one event; `Aggregations()` if there are none."""
    return (await store.aggregations(user, [event.event_id], **how)).get(
        event.event_id, Aggregations()
    )


async def replacement(store: Store, event: BuiltEvent, user: str = LOCAL, **how: Any) -> str | None:
    found = (await told(store, event, user, **how)).replacement
    return None if found is None else found.event_id


async def test_the_latest_edit_by_the_time_its_sender_claims(store: Store) -> None:
    room = new_room(members=[LOCAL])
    said = room.message(ADMIN)
    late = room.edit(ADMIN, said, "latest", ts=said.origin_server_ts + 9_000)
    room.edit(ADMIN, said, "earlier, though it comes later", ts=said.origin_server_ts + 5_000)
    await deliver(store, room)
    assert await replacement(store, said) == late.event_id
    twins = [
        late,
        *(
            room.edit(ADMIN, said, f"twin {number}", ts=late.origin_server_ts)
            for number in range(4)
        ),
    ]
    await deliver(store, room)
    assert await replacement(store, said) == max(ids(twins))
    for event in sorted(twins, key=lambda event: event.event_id, reverse=True)[:-1]:
        room.redact(ADMIN, event)
    await deliver(store, room)
    assert await replacement(store, said) == min(ids(twins))
    room.redact(ADMIN, said)
    await deliver(store, room)
    assert await replacement(store, said) is None


async def test_edits_that_are_not_valid(store: Store) -> None:
    room = new_room(members=[LOCAL], users={LOCAL: 100})
    said = room.message(ADMIN)
    topic = room.topic(ADMIN, "a state event")
    secret = room.send(ADMIN, "m.room.encrypted", {"ciphertext": "…"})
    new = {"m.new_content": {"body": "new"}}

    def edits(target: BuiltEvent) -> dict[str, Any]:
        return {"m.relates_to": {"rel_type": "m.replace", "event_id": target.event_id}}

    room.edit(LOCAL, said, "by somebody else")
    room.send(ADMIN, "m.sticker", {**new, **edits(said)})
    room.send(ADMIN, "m.room.message", {"body": "no new content", **edits(said)})
    room.send(ADMIN, "m.room.topic", {"topic": "other", **new, **edits(topic)}, state_key="")
    room.send(ADMIN, "m.room.topic", {"topic": "no state", **new, **edits(topic)})
    room.send(ADMIN, "m.room.message", {**new, **edits(said)}, state_key="of state")
    await deliver(store, room)
    assert await store.aggregations(LOCAL, ids(room.events)) == {}
    edit = room.edit(ADMIN, said, "valid")
    room.edit(ADMIN, edit, "an edit of an edit")
    hidden = room.send(ADMIN, "m.room.encrypted", {"ciphertext": "…", **edits(secret)})
    await deliver(store, room)
    assert {
        event_id: found.replacement
        for event_id, found in (await store.aggregations(LOCAL, ids(room.events))).items()
    } == {
        said.event_id: await store.event(edit.event_id),
        secret.event_id: await store.event(hidden.event_id),
    }


async def test_a_thread_in_short(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL, OTHER])
    root, other = room.message(ADMIN), room.message(ADMIN)
    replies = [room.threaded(OTHER, root, f"reply {number}") for number in range(4)]
    edit = room.edit(OTHER, replies[-1], "the last word")
    reference = relate(room, ADMIN, replies[-1])
    nested = room.threaded(LOCAL, replies[0], "threads cannot be nested")
    await deliver(store, room)
    statements.take()
    found = await store.aggregations(LOCAL, ids(room.events))
    assert len(statements.take()) == 1
    assert set(found) == {root.event_id, replies[-1].event_id}
    thread = found[root.event_id].thread
    assert thread is not None
    assert (thread.latest_event.event_id, thread.count, thread.participated) == (
        replies[-1].event_id,
        4,
        False,
    )
    assert thread.latest_event.relations == found[replies[-1].event_id]
    assert found[replies[-1].event_id].references == (reference.event_id,)
    assert found[replies[-1].event_id].replacement == await store.event(edit.event_id)
    assert (
        await told(store, root)
    ).thread == thread  # also where the latest reply was not asked for
    assert await told(store, other) == await told(store, nested) == Aggregations()
    assert (await told(store, root, ADMIN)).thread is not None
    room.threaded(LOCAL, root, "I am in it now")
    await deliver(store, room)
    room.redact(ADMIN, root)  # takes away edits, not the thread
    await deliver(store, room)
    participated = {user: (await told(store, root, user)).thread for user in (ADMIN, LOCAL, OTHER)}
    assert all(
        thread is not None and thread.participated and thread.count == 5
        for thread in participated.values()
    )


async def test_a_thread_as_each_reader_sees_it(store: Store) -> None:
    room = new_room(visibility="joined", members=[LOCAL, OTHER])
    root = room.message(ADMIN)
    first = room.threaded(ADMIN, root, "one")
    noise = room.threaded(OTHER, root, "two")
    room.leave(LOCAL)
    room.threaded(ADMIN, root, "three")
    taken_back = room.threaded(ADMIN, root, "four")
    room.redact(ADMIN, taken_back)
    await deliver(store, room)

    async def seen(user: str, *ignored: str) -> tuple[int, str] | None:
        thread = (await told(store, root, user, ignored=[UserId(one) for one in ignored])).thread
        return None if thread is None else (thread.count, str(thread.latest_event.content["body"]))

    assert await seen(ADMIN) == (3, "three")
    assert await seen(LOCAL) == (2, "two")
    assert await seen(LOCAL, OTHER) == (1, "one")
    assert await seen(LOCAL, OTHER, ADMIN) is None
    assert await store.aggregations("@nobody:s1.test", [root.event_id]) == {}
    await store.erase_user(OTHER)
    assert await seen(LOCAL) == (2, "two")
    assert first.event_id != noise.event_id


async def test_what_is_shown_redacted_has_no_edit_and_is_none(store: Store) -> None:
    room = new_room(members=[OTHER])
    said = room.message(OTHER)
    room.edit(OTHER, said, "better")
    reply = room.threaded(ADMIN, said, "why?")
    hidden = room.threaded(OTHER, said, "because")
    room.join(LOCAL)
    await deliver(store, room)
    assert await replacement(store, said) is not None
    await store.erase_user(OTHER)
    found = await told(store, said)
    assert found.replacement is None
    assert found.thread is not None
    assert (found.thread.latest_event.event_id, found.thread.count) == (reply.event_id, 1)
    whole = await told(store, said, ADMIN)
    assert whole.replacement is not None
    assert whole.thread is not None
    assert (whole.thread.latest_event.event_id, whole.thread.count) == (hidden.event_id, 2)


async def test_references_in_order(store: Store) -> None:
    room = new_room(members=[LOCAL])
    said = room.message(ADMIN)
    left, right = room.fork(2)
    references = [relate(left, ADMIN, said), relate(right, LOCAL, said), relate(left, ADMIN, said)]
    await deliver(store, room)
    expected = await store.relations(said.event_id, LOCAL, direction="f")
    assert (await told(store, said)).references == tuple(ids(expected.chunk))
    assert set(ids(expected.chunk)) == set(ids(references))
    room.redact(ADMIN, references[0])
    room.merge(left, right)
    await deliver(store, room)
    assert (await told(store, said)).references == tuple(
        one for one in ids(expected.chunk) if one != references[0].event_id
    )


async def test_reads_with_aggregations(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL])
    said = room.message(ADMIN)
    edit = room.edit(ADMIN, said, "better")
    reply = room.threaded(LOCAL, said, "why?")
    better = room.edit(LOCAL, reply, "why not?")
    await deliver(store, room)

    def check(events: list[StoredEvent]) -> None:
        found = {event.event_id: event.relations for event in events}
        assert found.pop(edit.event_id, None) is None
        assert found[reply.event_id] == Aggregations(
            replacement=next(one for one in shown if one.event_id == better.event_id)
        )
        if said.event_id in found:
            relations = found[said.event_id]
            assert relations is not None
            assert relations.replacement is not None
            assert relations.thread is not None
            assert relations.thread.latest_event.relations == found[reply.event_id]

    shown = list((await store.events(ids(room.events))).values())
    statements.take()
    check((await store.messages(room.room_id, LOCAL, aggregations=True)).chunk)
    assert len(statements.take()) == 2
    around = await store.context(said.event_id, LOCAL, aggregations=True)
    assert len(statements.take()) == 3
    check([*around.events_before, around.event, *around.events_after])
    page = await store.relations(said.event_id, LOCAL, recurse=True, aggregations=True)
    assert len(statements.take()) == 2
    assert page.recursion_depth == 3
    check(page.chunk)
    assert all(
        event.relations is None for event in (await store.messages(room.room_id, LOCAL)).chunk
    )


async def test_as_clients_get_it(store: Store) -> None:
    room = new_room(members=[LOCAL])
    said = room.message(ADMIN)
    edit = room.edit(ADMIN, said, "better")
    reply = room.threaded(LOCAL, said, "why?")
    better = room.edit(LOCAL, reply, "why not?")
    reference = relate(room, LOCAL, said)
    await deliver(store, room)

    def show(event: StoredEvent) -> dict[str, Any]:
        more = (
            {}
            if event.relations is None
            else {"unsigned": {"m.relations": event.relations.bundle(show)}}
        )
        return {"event_id": event.event_id, **more}

    assert (await told(store, said)).bundle(show) == {
        "m.replace": {"event_id": edit.event_id},
        "m.thread": {
            "latest_event": {
                "event_id": reply.event_id,
                "unsigned": {"m.relations": {"m.replace": {"event_id": better.event_id}}},
            },
            "count": 1,
            "current_user_participated": True,
        },
        "m.reference": {"chunk": [{"event_id": reference.event_id}]},
    }
    assert Aggregations().bundle(show) == {}


async def test_whose_ids_are_none(store: Store) -> None:
    assert await store.aggregations(LOCAL, []) == {}
    assert await store.aggregations(LOCAL, ["$unknown"]) == {}
    for user, event_id in ((LOCAL, "no id"), ("@a:else.test", "$x")):
        with pytest.raises(InvalidIdentifier):
            await store.aggregations(user, [event_id])
