"""Hostile events in a browser: no dialog, no script, no element of theirs, no broken layout.

The long run: STORAGE_EXAMPLES=10000 pytest tests/inspector/test_hostile.py -n 0 --timeout 0
"""

import os
from collections.abc import Sequence

from storage import Store
from storage.ids import EventId
from tests.inspector.browser import INTRUSIONS, LAYOUT_FAULTS, Browser, needs_browser
from tests.inspector.hostile import ADMIN, HOSTILE_ROOM_ID, hostile_ids, hostile_room
from tests.inspector.served import Served

pytestmark = needs_browser

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "60"))
OPENED = 16 if EXAMPLES < 1_000 else EXAMPLES
"""Pages of single events that are opened; the others are seen in the graph."""

NOTHING = [None, 0, 0]

EVENT_PAGE = f"""
const shown = document.getElementById("event").dataset.event;
const raw = document.querySelectorAll("#raw").length;
return [shown, raw, (() => {{ {INTRUSIONS} }})(), (() => {{ {LAYOUT_FAULTS} }})()];
"""
"""The event of a page, whether its bytes are there, and what `is_harmless` looks at."""


async def is_harmless(browser: Browser) -> None:
    """An open dialog would fail the next command of the browser."""
    assert await browser.run(INTRUSIONS) == NOTHING
    assert await browser.faults() == []


async def test_hostile_events(store: Store, site: Served, browser: Browser) -> None:
    room = hostile_room(EXAMPLES)
    for at in range(0, len(room.pdus), 500):
        await store.append(room.pdus[at : at + 500])
    stored = await store.events([event.event_id for event in room.events])
    assert len(stored) > 0.9 * EXAMPLES
    await graph_is_harmless(browser, site, room.room_id, len(stored))
    for width in (400, 1280):
        await browser.resize(width)
        pages: list[tuple[str, dict[str, str]]] = [
            ("/", {"content": "1"}),
            ("/state", {"room": room.room_id, "content": "1"}),
            ("/room/changes", {"id": room.room_id}),
            ("/search", {"q": "<script>"}),
            ("/room", {"id": '!"><img src=x onerror=window.pwned=1>'}),
        ]
        for path, given in pages:
            await browser.open(site.address(path, **given))
            assert await browser.run(INTRUSIONS) == NOTHING
            messages = [one for one in await browser.faults() if "status of 40" not in one]
            assert messages == []
    step = max(1, len(stored) // OPENED)
    await events_are_harmless(browser, site, list(stored)[::step])


async def graph_is_harmless(browser: Browser, site: Served, room_id: str, events: int) -> None:
    """Scroll the whole graph, with content, at the narrowest width."""
    await browser.resize(400)
    await browser.open(site.address("/room", id=room_id, content=1))
    seen: set[str] = set()
    for _ in range(events):
        seen |= set(await browser.values("#graph .row", "event"))
        await is_harmless(browser)
        if len(seen) >= events:
            break
        await browser.run("const g = document.getElementById('graph'); g.scrollTop += 3000;")
        await browser.wait("return document.querySelector('#graph[data-ready]')")
    assert len(seen) >= events


async def events_are_harmless(browser: Browser, site: Served, event_ids: Sequence[EventId]) -> None:
    """Open the page of each event, with content: every other one is narrow.

    One script looks at all of a page, as each call of the browser costs a long run its time.
    """
    for width, seen in ((1280, event_ids[::2]), (400, event_ids[1::2])):
        await browser.resize(width)
        for event_id in seen:
            await browser.open(site.address("/event", id=event_id, content=1))
            assert await browser.run(EVENT_PAGE) == [event_id, 1, NOTHING, []], event_id
            assert await browser.messages() == [], event_id


async def test_hostile_ids(store: Store, site: Served, browser: Browser) -> None:
    made = dict(hostile_ids())
    results = await store.append(list(made.values()))
    assert [one.outcome for one in results if one.outcome != "stored"] == []
    await browser.resize(400)
    await browser.open(site.address("/room", id=HOSTILE_ROOM_ID))
    await browser.wait("return document.querySelector('#graph[data-ready]')")
    assert len(await browser.values("#graph .row", "event")) == len(made)
    await is_harmless(browser)
    for number in range(0, len(made), 2):  # each link leads to the page of its event
        await browser.open(site.address("/room", id=HOSTILE_ROOM_ID))
        await browser.run(f"document.querySelectorAll('#graph .what')[{number}].click()")
        await browser.wait(
            "return location.pathname === '/event' && document.getElementById('event')"
        )
        shown = await browser.run("return new URLSearchParams(location.search).get('id')")
        assert shown in made
        await is_harmless(browser)
        await browser.open(site.address("/why", event=shown, reader=ADMIN))
        assert await browser.values("#sentence", "visible") == ["yes"]
        await is_harmless(browser)


async def test_the_checks_notice_an_attack(site: Served, browser: Browser) -> None:
    """What would succeed without the policy: it is refused, and the page would show it."""
    await browser.open(site.url)
    await is_harmless(browser)
    for attack in (
        "const s = document.createElement('script'); s.src = '/x.js'; document.body.append(s);",
        "const s = document.createElement('script'); s.text = 'pwned=1'; document.body.append(s);",
        "document.querySelector('main').innerHTML = '<img src=x onerror=window.pwned=1>';",
        "document.body.setAttribute('onclick', 'window.pwned=1'); document.body.click();",
    ):
        await browser.run(f"try {{ {attack} }} catch (error) {{ console.error(error.message) }}")
        assert (await browser.run(INTRUSIONS))[0] is None
        assert await browser.messages() != []
    await browser.run("document.querySelector('main').append(document.createElement('iframe'));")
    assert (await browser.run(INTRUSIONS))[2] == 1
    await browser.run(
        "const one = document.createElement('p'); one.textContent = 'W'.repeat(999);"
        "one.style.overflowWrap = 'normal'; document.querySelector('main').append(one);"
    )
    assert await browser.faults() != []
