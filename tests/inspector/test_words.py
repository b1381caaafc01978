"""What a page says to a reader who does not know the store: words, next steps, the same numbers."""

import re
import time
from datetime import UTC, datetime
from html import escape, unescape
from urllib.parse import quote

import pytest

from storage import Store
from storage.ids import RoomId
from storage.inspector.rendering import compact
from storage.inspector.text import day, moment, percent
from storage.queries.inspect import rooms
from storage.queries.inspect.lines import lines_by_id
from storage.testing import RoomBuilder, build_room, deliver_with_gap
from tests.inspector.browser import Browser, needs_browser
from tests.inspector.served import Served
from tests.inspector.test_reads import ask
from tests.inspector.test_resolution import ADMIN, MOD, OTHER, Fork, at
from tests.maintenance.rooms import LIVELY, SERVER, deliver

ALICE, INVITED = f"@alice:{SERVER}", f"@invited:{SERVER}"


def words(html: str) -> str:
    """The text of a page in one line."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


async def test_growth_splits_new_events_and_history(store: Store, site: Served) -> None:
    room = build_room(LIVELY, 90, seed=1, sign=False)
    await deliver(store, deliver_with_gap(room, 40, 60))
    stored = await store.events([event.event_id for event in room.events])
    arrived = [event for event in stored.values() if event.stream_ordering is not None]
    lines = await ask(store, lines_by_id, [event.event_id for event in arrived])
    history = [line for line in lines.values() if line.backfilled]
    assert history
    both = f'data-events="{len(arrived)}" data-history="{len(history)}"'
    of_all = await site.get("/growth")
    assert both in of_all.text
    of_room = await site.get("/room/growth", id=room.room_id)
    assert both in of_room.text
    new = len(arrived) - len(history)
    assert f"{len(arrived)} events arrived: {new} new and {len(history)} of older history" in words(
        of_room.text
    )
    assert f'data-value="{new}"' in of_room.text
    assert '<td class="n" data-label="Share of this week">100.0 %</td>' in of_all.text
    assert 'width="100.0"' in of_all.text
    other = await ask(store, rooms.room_growth, 1, 10_000, room_id=RoomId("!other:s1.test"))
    assert other.rooms == []


async def test_a_user_or_server_that_nobody_knows(store: Store, site: Served) -> None:
    room = RoomBuilder("11", seed=1)
    room.start(ALICE)
    room.invite(ALICE, INVITED)
    await store.append(room.pdus)
    event_id = room.events[-1].event_id
    for reader, is_known in [
        (ALICE, True),
        (INVITED, True),  # only named by an event
        (f"@alise:{SERVER}", False),
        (SERVER, True),
        ("nowhere.example", False),
    ]:
        why = words((await site.get("/why", event=event_id, reader=reader)).text)
        assert ("check the spelling" in why) != is_known, reader
        if reader.startswith("@"):
            user = words((await site.get("/user", id=reader)).text)
            assert ("check the spelling" in user) != is_known, reader


async def test_a_failure_keeps_what_was_entered(store: Store, site: Served) -> None:
    room = RoomBuilder("11", seed=1)
    room.start(ALICE)
    await store.append(room.pdus)
    event_id = room.events[-1].event_id
    for path, given, cause in [
        ("/why", {"event": "$nonsense", "reader": ALICE}, "Unknown event $nonsense."),
        ("/why", {"event": event_id, "reader": "bob"}, "no server of this name is known here"),
        ("/resolution", {"event": "$nonsense"}, "Unknown event $nonsense."),
        ("/event", {"id": '$"><b>'}, 'Unknown event $"><b>.'),
        ("/room", {"id": "nothing"}, "a room id begins with !"),
    ]:
        answer = await site.get(path, **given)
        assert answer.status in {400, 404}
        [box] = re.findall(r'id="failure"[^>]*>(.*?)</p>', answer.text)
        assert cause in unescape(box), box
        main = answer.text[answer.text.index("<main") :]
        assert re.findall(r'<input[^>]* value="([^"]*)"', main) == [
            escape(value, quote=True).replace("&quot;", "&#34;") for value in given.values()
        ]
        assert "address" not in words(main)


async def test_a_room_in_the_field_of_a_merge(site: Served) -> None:
    answer = await site.get("/resolution", event=" !room:s1.test ")
    assert (answer.status, answer.headers["Location"]) == (
        303,
        "/room?id=%21room%3As1.test#merges",
    )


async def test_a_resolution_explains_itself(store: Store, site: Served) -> None:
    """Content is there only if asked for; each step says why it is checked."""
    fork = Fork(seed=7)
    fork.left.power_levels(ADMIN, users={ADMIN: 100, MOD: 50, ALICE: 1}, ts=500)
    left = fork.left.topic(ADMIN, "first", ts=1_000)
    fork.left.ban(ADMIN, OTHER, ts=1_500)
    right = fork.right.topic(MOD, "second", ts=2_000)
    fork.room.merge(fork.left, fork.right)
    merge = fork.room.message(ADMIN, "both")
    await store.append(fork.room.pdus)
    hidden = (await site.get("/resolution", event=merge.event_id)).text
    found = await at(store, merge.event_id)
    said = words(hidden)
    assert "Checked: this replay and the stored state have the same values." in said
    for number, tip in enumerate(found.tips, 1):
        assert f"Branch {number}: {tip} " in said
    assert found.replay is not None
    assert len(re.findall(r"by \S+; (a value of a branch|of the auth difference)", said)) == len(
        found.replay.steps
    )
    for term in ("Phase", "Level", "Mainline", "Auth difference", "Full conflicted set"):
        assert f"<dt>{term}</dt>" in hidden
    shown = (await site.get("/resolution", event=merge.event_id, content=1)).text
    for event in (await store.events([left.event_id, right.event_id])).values():
        topic = compact(event.content)
        assert topic not in unescape(hidden)
        assert topic in unescape(shown)


async def test_weeks_begin_with_a_day_and_the_latest_is_first(site: Served) -> None:
    today = int(datetime(2026, 3, 5, 23, 59, 59, tzinfo=UTC).timestamp() * 1000)
    begins = [moment(begin) for begin in rooms.week_begins(today, 3)]
    assert begins == ["2026-02-13 00:00:00", "2026-02-20 00:00:00", "2026-02-27 00:00:00"]
    before = rooms.week_begins(time.time_ns() // 10**6, 8)
    shown = re.findall(r'<th scope="row">(.*?)</th>', (await site.get("/growth")).text)
    after = rooms.week_begins(time.time_ns() // 10**6, 8)
    assert shown in ([day(begin) for begin in begins[::-1]] for begins in (before, after))


async def test_a_share_is_that_of_the_week(store: Store, site: Served) -> None:
    for seed, messages in ((1, 2), (2, 40)):
        room = RoomBuilder("11", seed=seed)
        room.start(ALICE)
        for _ in range(messages):
            room.message(ALICE)
        await store.append(room.pdus)
    page = (await site.get("/growth")).text
    found = await ask(store, rooms.room_growth, 1, 10_000)
    total = sum(row.events for row in found.rooms)
    positions = int(re.findall(r"of (\d+) since", words(page))[0])
    assert positions >= total
    shares = re.findall(r'data-label="Share of this week">(.*?)</td>', page)
    assert shares == [percent(row.events, positions) for row in found.rooms]
    assert len(shares) == 2
    assert (percent(999, 1_000), percent(2, 3), percent(1, 0)) == ("99.9 %", "66.6 %", "0.0 %")


async def test_one_word_for_one_thing(store: Store, site: Served) -> None:
    room = RoomBuilder("11", seed=1)
    room.start(ALICE)
    await store.append(room.pdus)
    event_id = room.events[-1].event_id
    pages = [
        await site.get("/"),
        await site.get("/room", id=room.room_id),
        await site.get("/why", event=event_id, reader=ALICE),
        await site.get("/why", event=event_id, reader="s2.test"),
        await site.get("/resolution", event=event_id),
    ]
    first, of_room, user, server, _ = said = [words(page.text) for page in pages]
    for text in said:
        assert not re.search(r"\bforks?\b|Reader\b|\bKeys\b|seen by|To show it", text)
        assert "in the log you are tester" in text
    for text in (first, of_room):
        for term in ("Forward extremity", "Gap", "Outlier", "Longest path"):
            assert f"{term} A" in text or f"{term} The" in text
        assert "Content is hidden. Showing it is logged." in text
    explained = await store.explain_visibility(event_id, ALICE)
    before, after = explained.membership
    assert f"Membership {before} before the event, {after} after it; joined later" in user
    assert "Membership none before the event, none after it" in server
    assert "joined later" not in server.partition("Membership")[2]


async def test_what_to_look_at_next(store: Store, site: Served) -> None:
    room = RoomBuilder("11", seed=1)
    room.start(ALICE, history_visibility="joined")
    message = room.message(ALICE)
    await store.append(room.pdus)
    outlier = RoomBuilder("11", seed=2)
    outlier.start(ALICE)
    await store.append(outlier.pdus, origin="outlier")
    key = ("m.room.history_visibility", "")
    set_by = (await store.state_before(message.event_id))[key]
    page = (await site.get("/why", event=message.event_id, reader=INVITED)).text
    links = [unescape(one) for one in re.findall(r'<a[^>]* href="([^"]*)"', page)]
    id_of = quote(message.event_id, safe="")
    for wanted in (
        "/",
        f"/event?id={id_of}#readers",
        f"/state?event={id_of}&when=before&q=m.room.member",
        f"/event?id={quote(set_by, safe='')}",
    ):
        assert wanted in links
        assert (await site.send("GET", site.url + wanted.partition("#")[0])).status == 200
    assert ">Home</a>" in page
    first = (await site.get("/why", event=room.events[0].event_id, reader=ALICE)).text
    assert "No event had set the history visibility before it" in words(first)
    last = outlier.events[-1].event_id
    assert (await site.get("/why", event=last, reader=ALICE)).status == 200


@pytest.mark.xdist_group("browser")
@needs_browser[1]
async def test_an_event_id_is_whole_in_its_field(site: Served, browser: Browser) -> None:
    for width in (400, 1280):
        await browser.resize(width)
        await browser.open(site.url)
        widths = await browser.run(
            "return [...document.querySelectorAll('.why [name=event]')].map((one) =>"
            " { one.value = '$' + 'M'.repeat(43); return [one.scrollWidth, one.clientWidth]; })"
        )
        assert len(widths) == 2
        assert all(needed <= there for needed, there in widths), (width, widths)
        assert await browser.faults() == []
