"""Each page in a browser: what it shows equals what the library returns."""

import json
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import quote

import pytest

from storage import Store
from storage.ids import EventId, RoomId
from storage.maintenance.purge import purge_history
from storage.queries.inspect import rooms as growth_query
from storage.testing import BuiltEvent, Odd, RoomBuilder, build_room, deliver_with_gap
from tests.inspector.browser import Browser, needs_browser
from tests.inspector.served import Served, served
from tests.inspector.test_reads import ask, stored_sizes
from tests.inspector.test_resolution import ADMIN, MOD, Fork
from tests.maintenance.rooms import LIVELY, deliver

pytestmark = needs_browser

BOB = "@bob:s1.test"


class Furnished(NamedTuple):
    """A lively room with a gap, and a room of two forks that were merged."""

    site: Served
    lively: RoomBuilder
    ids: list[EventId]
    fork: Fork
    merge: BuiltEvent


@pytest.fixture
async def furnished(store: Store) -> AsyncIterator[Furnished]:
    lively = build_room(
        LIVELY.replaced(fork_rate=0.2, odd=Odd(rejected=0.05, soft_failed=0.05)),
        110,
        seed=1,
        sign=False,
    )
    await deliver(store, deliver_with_gap(lively, 40, 60))
    fork = Fork(seed=7)
    fork.left.topic(ADMIN, "first", ts=1_000)
    fork.right.topic(MOD, "second", ts=2_000)
    fork.room.merge(fork.left, fork.right)
    merge = fork.room.message(ADMIN, "both")
    await store.append(fork.room.pdus)
    stored = await store.events([event.event_id for event in lively.events])
    async with served(store) as site:
        yield Furnished(site, lively, list(stored), fork, merge)


async def test_the_first_page(store: Store, furnished: Furnished, browser: Browser) -> None:
    await browser.open(furnished.site.url)
    rooms = await browser.values("#rooms tr[data-room]", "room")
    assert rooms == [furnished.fork.room.room_id, furnished.lively.room_id]
    info = await store.rooms([RoomId(one) for one in rooms])
    numbers = await browser.values("#rooms td[data-label=Joined]", "value")
    assert numbers == [str(info[RoomId(room)].joined_count) for room in rooms]
    counts = await browser.values("#rooms td[data-label=Events]", "value")
    stored = await store.events(furnished.ids)
    timeline = [event for event in stored.values() if not event.outlier]
    assert counts == [str(len(furnished.fork.room.events)), str(len(timeline))]
    gaps = await browser.values("#rooms td[data-label=Gaps]", "value")
    assert gaps == ["0", str(len(await store.backward_extremities(furnished.lively.room_id)))]
    for order in ("id", "members", "extremities", "depth"):
        await browser.open(furnished.site.address("/", order=order))
        assert set(await browser.values("#rooms tr[data-room]", "room")) == set(rooms)
        assert await browser.faults() == []


async def test_a_room(store: Store, furnished: Furnished, browser: Browser) -> None:
    room_id = furnished.lively.room_id
    await browser.open(furnished.site.address("/room", id=room_id))
    await browser.wait("return document.querySelector('#graph[data-ready]')")
    stored = await store.events(furnished.ids)
    expected = sorted(
        (event for event in stored.values() if not event.outlier),
        key=lambda event: (event.topological_ordering, event.stream_ordering),
        reverse=True,
    )
    await browser.run("const graph = document.getElementById('graph'); graph.scrollTop = 1e6")
    await browser.wait(f"return document.querySelectorAll('.row').length >= {len(expected)}")
    rows = await browser.run(
        "return [...document.querySelectorAll('#graph .row')].map((row) => [row.dataset.event,"
        " row.querySelector('.what').textContent, row.querySelector('.who').textContent,"
        " row.querySelector('.flags').textContent.split(/\\s+/).filter(Boolean)])"
    )
    assert [row[0] for row in rows] == [event.event_id for event in expected]
    for (_, what, who, flags), event in zip(rows, expected, strict=True):
        key = f" {event.state_key}" if event.state_key else ""
        assert what == f"{event.type}{key}"
        assert who == event.sender
        assert ("rejected" in flags) == (event.rejected is not None)
        assert ("soft-failed" in flags) == event.soft_failed
        assert ("redacted" in flags) == event.pruned
        assert ("state" in flags) == (event.state_key is not None)
    extremities = await browser.values("[data-extremity]", "extremity")
    assert set(extremities) == await store.forward_extremities(room_id)
    info = (await store.rooms([room_id]))[room_id]
    facts = dict(await browser.run(FACTS))
    assert facts["joined"] == str(info.joined_count)
    assert facts["version"] == info.version
    assert facts["extremities"] == str(len(extremities))
    nodes = await browser.run("return document.querySelectorAll('.lanes .node').length")
    assert nodes == len(expected)
    assert await browser.faults() == []


FACTS = (
    "return [...document.querySelectorAll('[data-fact]')].map((one) =>"
    " [one.dataset.fact, one.textContent.trim()])"
)


async def test_an_event(store: Store, furnished: Furnished, browser: Browser) -> None:
    stored = await store.events(furnished.ids)
    sizes = await ask(store, stored_sizes)
    some = [*furnished.ids[::17], next(i for i, e in stored.items() if e.rejected)]
    for event_id in some:
        event = stored[event_id]
        await browser.open(furnished.site.address("/event", id=event_id))
        facts = dict(await browser.run(FACTS))
        assert facts["type"] == event.type
        assert facts["sender"] == event.sender
        assert facts["stream_ordering"] == str(event.stream_ordering)
        assert facts["topological_ordering"] == str(event.topological_ordering)
        assert facts["depth"] == str(event.depth)
        assert facts["bytes"] == str(sizes[event_id])
        if event.rejected:
            assert facts["verdict"] == f"Rejected: {event.rejected}."
        elif event.soft_failed:
            assert facts["verdict"].startswith("Soft-failed")
        else:
            assert facts["verdict"] == "Accepted."
        assert await browser.values("[data-parent]", "parent") == event.json["prev_events"]
        assert await browser.values("[data-auth]", "auth") == event.json["auth_events"]
        chain = await store.auth_chain_ids([event_id])
        assert set(await browser.values("#chain .row", "event")) == chain
        readers = await browser.run(
            "return [...document.querySelectorAll('[data-reader]')].map((one) =>"
            " [one.dataset.reader, one.dataset.visible])"
        )
        for user, is_visible in readers:
            visible = await store.visible_to_user(user, [event_id])
            assert is_visible == ("yes" if visible else "no")
        assert await browser.faults() == []
        await browser.open(furnished.site.address("/event", id=event_id, content=1))
        [raw] = await browser.texts("#raw")
        assert raw.encode() == event.raw
        [served_json] = await browser.texts("#served")
        assert json.loads(served_json) == event.json


async def test_states(store: Store, furnished: Furnished, browser: Browser) -> None:
    site, room_id = furnished.site, furnished.lively.room_id

    async def shown(**given: str) -> dict[tuple[str, str], str]:
        await browser.open(site.address("/state", **given))
        assert await browser.faults() == []
        rows = await browser.run(
            "return [...document.querySelectorAll('#state tr[data-type]')].map((row) =>"
            " [row.dataset.type, row.dataset.key, row.dataset.after, row.dataset.before])"
        )
        return {(type_, key): after for type_, key, after, _ in rows}

    assert await shown(room=room_id) == await store.current_state(room_id)
    event_id = furnished.ids[-3]
    assert await shown(event=event_id, when="before") == await store.state_before(event_id)
    assert await shown(event=event_id) == await store.state_after(event_id)
    other = furnished.ids[30]
    states = await store.states_after([other, event_id])
    old, new = states[other], states[event_id]
    difference = await shown(event=other, other=event_id)
    assert difference == {
        key: new.get(key, "") for key in old.keys() | new.keys() if old.get(key) != new.get(key)
    }
    members = await store.events([e.event_id for e in furnished.lively.events if e.state_key])
    member = next(one.event_id for one in members.values() if one.rejected is None)
    change = await shown(event=member, when="change")
    assert list(change.values()) == [member]
    filtered = await shown(room=room_id, q="m.room.create")
    assert [key for key, _ in filtered] == ["m.room.create"]


async def test_who_may_see_an_event(store: Store, furnished: Furnished, browser: Browser) -> None:
    event_id = furnished.ids[50]
    for reader in (furnished.lively.events[0].sender, "@nobody:s1.test", "s2.test"):
        await browser.open(furnished.site.address("/why", event=event_id, reader=reader))
        explained = await store.explain_visibility(event_id, reader)
        assert await browser.text("#sentence") == explained.sentence
        facts = dict(await browser.run(FACTS))
        assert facts["visibility_before"] == (explained.history_visibility[0] or "not set: shared")
        assert await browser.faults() == []


async def test_a_resolution(store: Store, furnished: Furnished, browser: Browser) -> None:
    merge = furnished.merge.event_id
    left, right = furnished.fork.left.heads[0], furnished.fork.right.heads[0]
    await browser.open(furnished.site.address("/resolution", event=merge))
    assert await browser.text("#sentence") == (
        "The merge preferred branch 2: it won 1 of 1 conflicted key. "
        f"{MOD}'s m.room.topic won over {ADMIN}'s: same power levels event, later claimed time."
    )
    assert await browser.values("#confirmed", "confirmed") == ["yes"]
    assert set(await browser.values("[data-tip]", "tip")) == {left, right}
    assert await browser.values(".key-reason", "resolved") == [
        (await store.state_before(merge))[("m.room.topic", "")]
    ]
    steps = await browser.values("[data-step]", "step")
    assert [step for step in steps if step in {left, right}] == [left, right]
    assert set(await browser.values("[data-step]", "allowed")) == {"yes"}
    assert await browser.faults() == []


async def test_three_questions_in_three_clicks(
    store: Store, furnished: Furnished, browser: Browser
) -> None:
    """From the first page. Typing is no click; each wait is for the page that a click leads to."""
    site, fork = furnished.site, furnished.fork.room
    arrived = "return location.pathname === arguments[0] && document.readyState === 'complete'"

    async def click(selector: str, leads_to: str) -> None:
        await browser.run("document.querySelector(arguments[0]).click()", selector)
        await browser.wait(arrived.replace("arguments[0]", f"'{leads_to}'"))

    await browser.open(site.url)  # why can bob not see $x: one click
    await browser.run(
        "const [event, reader] = arguments; const form = document.querySelector('form.why');"
        "form.elements.event.value = event; form.elements.reader.value = reader;",
        furnished.merge.event_id,
        BOB,
    )
    await click("form.why button", "/why")
    assert await browser.text("#sentence") == (
        f"{BOB} may not see {furnished.merge.event_id}: the history visibility was shared, "
        "and they were not members, and they never joined later. "
        f"No event by or about {BOB} is stored here: check the spelling."
    )
    await browser.open(site.url)  # which fork did the merge prefer, and why: two clicks
    await click(f"tr[data-room='{fork.room_id}'] a", "/room")
    await click(f"[data-merge='{furnished.merge.event_id}'] a", "/resolution")
    assert "has the later claimed time" in await browser.text(".key-reason .why")
    await browser.open(site.url)  # what grew this week: one click
    await click(".questions a.button", "/growth")
    most = (await ask(store, growth_query.room_growth, 1, 10_000)).rooms[0]
    assert (await browser.text("#sentence")).startswith(
        f"{most.room_id} grew most: {most.events:.0f} events"
    )


async def test_growth(store: Store, furnished: Furnished, browser: Browser) -> None:
    await browser.open(furnished.site.address("/growth"))
    rooms = await browser.values("#growth tr[data-room]", "room")
    events = await browser.values("#growth tr[data-room]", "events")
    stored = await store.events(furnished.ids)
    positions = sum(event.stream_ordering is not None for event in stored.values())
    assert dict(zip(rooms, events, strict=True)) == {
        furnished.lively.room_id: str(positions),
        furnished.fork.room.room_id: str(len(furnished.fork.room.events)),
    }
    assert await browser.faults() == []
    await browser.open(furnished.site.address("/room/growth", id=furnished.fork.room.room_id))
    weeks = await browser.values("#weeks [data-value]", "value")
    assert weeks == [str(len(furnished.fork.room.events))] + ["0"] * 11
    assert await browser.faults() == []


async def test_growth_on_a_phone(furnished: Furnished, browser: Browser) -> None:
    """The page is not wider than the window, and wide tables have a bar of their own."""
    await browser.resize(400)
    for address in (
        furnished.site.address("/growth"),
        furnished.site.address("/room/growth", id=furnished.fork.room.room_id),
    ):
        await browser.open(address)
        assert await browser.run("return document.documentElement.scrollWidth <= innerWidth")


async def test_parts_of_a_room(store: Store, furnished: Furnished, browser: Browser) -> None:
    site, room_id = furnished.site, furnished.lively.room_id
    await browser.open(site.address("/room/gaps", id=room_id))
    assert await browser.values("[data-gap]", "gap") == [
        gap.event_id for gap in await store.gaps(room_id)
    ]
    assert await browser.faults() == []
    await browser.open(site.address("/room/changes", id=room_id, type="m.room.create"))
    assert len(await browser.values("[data-position]", "position")) == 1
    assert await browser.faults() == []
    await browser.open(site.address("/room/outliers", id=room_id))
    stored = await store.events(furnished.ids)
    assert set(await browser.values("#outliers .row", "event")) == {
        event.event_id for event in stored.values() if event.outlier
    }
    assert await browser.faults() == []


async def test_a_user(store: Store, furnished: Furnished, browser: Browser) -> None:
    user = furnished.lively.events[0].sender
    since = (await store.sync(user)).next_batch
    later = furnished.lively.message(user, "later")
    await store.append([later.pdu])
    await browser.open(furnished.site.address("/user", id=user, sync=1, since=since))
    rooms = await browser.run(
        "return [...document.querySelectorAll('#rooms tr[data-room]')].map((row) =>"
        " [row.dataset.room, row.dataset.membership])"
    )
    assert dict(rooms) == await store.memberships_of(
        user, ("join", "invite", "knock", "leave", "ban")
    )
    answer = await store.sync(user, since=since)
    assert await browser.text("[data-fact=next_batch]") == answer.next_batch
    assert await browser.values("#sync [data-event]", "event") == [later.event_id]
    await browser.open(furnished.site.address("/user", id=user, sync=1))
    whole = (await store.sync(user, timeline_limit=10)).join[furnished.lively.room_id]
    assert await browser.values("#sync [data-section]", "section") == ["join"]
    assert await browser.values("#sync [data-event]", "event") == [
        event.event_id for event in whole.timeline.events
    ]
    assert await browser.values("#sync [data-state]", "state") == [
        event.event_id for event in whole.state
    ]
    assert await browser.values(".ranges .fill", "first")
    assert await browser.faults() == []
    remote = next(e.sender for e in furnished.lively.events if e.sender.endswith(":s2.test"))
    await browser.open(furnished.site.address("/user", id=remote))
    shown = await browser.values("#rooms tr[data-room]", "membership")
    assert shown == list((await store.memberships_of(remote, ("join", "leave", "ban"))).values())


async def test_streams(store: Store, furnished: Furnished, browser: Browser) -> None:
    before = {name: one.linear() for name, one in store.streams.items()}
    await browser.open(furnished.site.address("/streams"))
    linear = await browser.run(
        "return [...document.querySelectorAll('[data-stream]')].map((one) => [one.dataset.stream,"
        " Number(one.querySelector('[data-fact=linear]').textContent)])"
    )
    shown = dict(linear)
    assert shown.keys() == before.keys()
    for name, stream in store.streams.items():  # an idle writer moves meanwhile
        assert before[name] <= shown[name] <= stream.linear()
    assert store.instance_name in await browser.values("[data-writer]", "writer")
    assert await browser.faults() == []


async def test_operations(store: Store, furnished: Furnished, browser: Browser) -> None:
    room_id = furnished.lively.room_id
    await purge_history(
        store.database,
        room_id,
        server_name=store.server_name,
        before_event_id=furnished.ids[20],
        local=True,
    )
    await browser.open(furnished.site.address("/operations"))
    assert await browser.values("[data-purge]", "phase") == ["done"]
    assert {"events", "rooms"} <= set(await browser.values("[data-table]", "table"))
    assert await browser.values("[data-cache]", "cache") == sorted(store.caches.counted())
    assert "append" in await browser.values("[data-call]", "call")
    assert await browser.faults() == []
    await browser.open(
        furnished.site.address("/explain", query="messages", room=room_id, user=ADMIN)
    )
    indexes = " ".join(await browser.values(".plan", "indexes"))
    assert "rooms_room_id_key" in indexes
    assert await browser.faults() == []
    await browser.open(furnished.site.address("/explain", query="sync"))
    assert await browser.values(".plan", "indexes") == []  # it lacks the user


async def test_search(furnished: Furnished, browser: Browser) -> None:
    site, event_id = furnished.site, furnished.merge.event_id
    for wanted, path in [
        (event_id, "/event"),
        (furnished.lively.room_id, "/room"),
        (ADMIN, "/user"),
    ]:
        await browser.open(site.address("/search", q=wanted))
        shown = await browser.run("return location.pathname + location.search")
        assert shown == f"{path}?id={quote(wanted, safe='')}"
    await browser.open(site.address("/search", q=event_id[1:]))  # without its sigil
    assert await browser.texts(".results[data-kind='/event'] a") == [event_id]
    await browser.open(site.address("/search", q=ADMIN[1:4]))
    assert ADMIN in await browser.texts(".results[data-kind='/user'] a")
    assert await browser.faults() == []
    await browser.open(site.address("/search", q="nothing at all"))
    assert len(await browser.texts("#nothing")) == 1


async def test_an_id_that_is_not_stored(furnished: Furnished, browser: Browser) -> None:
    for path, status in [
        ("/room?id=!nothing:s1.test", "404"),
        ("/event?id=$nothing", "404"),
        ("/room?id=nothing", "400"),
        ("/room", "400"),
        ("/event?id=$a%00b", "400"),
        (f"/room?id=!{'x' * 5_000}", "400"),
        (f"/room?id={furnished.lively.room_id}&at=-1", "400"),
        ("/?order=size", "400"),
        ("/user?id=@a", "400"),
        ("/explain?query=nothing", "400"),
        ("/resolution?event=$nothing", "404"),
        ("/state?room=!nothing:s1.test", "404"),
        (f"/room/rows?id={furnished.lively.room_id}&below=1", "400"),
        (f"/room/rows?id={furnished.lively.room_id}&below=1.99999999999999999999", "none"),
    ]:
        await browser.open(furnished.site.url + path)
        assert await browser.values("#failure", "status") == ([] if status == "none" else [status])
        assert [one for one in await browser.faults() if "status of 40" not in one] == []
