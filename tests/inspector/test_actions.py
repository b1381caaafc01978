"""Actions: only with read_write, only after a confirmation, and what each does.

The store has the role of a homeserver, as docs/how-to/inspect-a-room.md says.
"""

import logging
import re
from collections.abc import AsyncIterator

import asyncpg
import pytest
from starlette.requests import HTTPConnection

import storage
from storage import Store
from storage.inspector import Viewer
from storage.inspector.actions.catalogue import ACTIONS
from storage.testing import BuiltEvent, RoomBuilder
from tests.database.test_roles import Logins, logins
from tests.inspector.served import HttpAnswer, Served, served
from tests.maintenance.rooms import SERVER

ALICE = f"@alice:{SERVER}"
LOOKS = "storage.inspector.rendering"
__all__ = ["logins"]  # a fixture


@pytest.fixture
async def store(logins: Logins) -> AsyncIterator[Store]:
    async with storage.open(logins.runtime, server_name=SERVER) as opened:
        yield opened


@pytest.fixture
async def site(store: Store) -> AsyncIterator[Served]:
    """An inspector that may write, for some."""

    async def access(connection: HTTPConnection) -> Viewer | None:
        name = connection.headers.get("x-operator", "chief")
        return Viewer(name, write=name != "clerk")

    async with served(store, access=access, read_write=True) as running:
        yield running


@pytest.fixture
async def owner(logins: Logins) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(logins.owner)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
async def refused(store: Store) -> tuple[RoomBuilder, BuiltEvent]:
    """A room, and an event of it that this server refused."""
    room = RoomBuilder("11", seed=1)
    room.start(ALICE)
    spam = room.message(ALICE, "spam?")
    await store.append([event.pdu for event in room.events if event is not spam])
    await store.append([spam.pdu], refused={spam.event_id: "spam"})
    return room, spam


async def form_of(site: Served, action: str, **fields: str) -> dict[str, str]:
    """The fields of the confirmation page."""
    answer = await site.get("/actions/confirm", action=action, **fields)
    assert answer.status == 200, answer.text
    assert ACTIONS[action].effect.replace("'", "&#39;") in answer.text
    found = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', answer.text)
    return dict(found)


async def ran(site: Served, form: dict[str, str], **headers: str) -> HttpAnswer:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return await site.send("POST", site.address("/actions/run"), data=form, headers=given)


async def result_of(site: Served, action: str, **fields: str) -> str:
    """Confirm and run an action; return the sentence that is shown then."""
    answer = await ran(site, await form_of(site, action, **fields))
    assert answer.status == 303, answer.text
    page = await site.send("GET", site.url + answer.headers["Location"])
    return page.text.split('id="result"')[1].split(">", 1)[1].split("</p>")[0]


async def test_an_event_is_readmitted(
    store: Store,
    site: Served,
    refused: tuple[RoomBuilder, BuiltEvent],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOOKS)
    _, spam = refused
    page = await site.get("/event", id=spam.event_id)
    assert "Refused by this server: spam." in page.text
    assert "/actions/confirm?action=readmit" in page.text
    assert (await store.events([spam.event_id]))[spam.event_id].soft_failed  # nothing yet
    said = await result_of(site, "readmit", event=spam.event_id)
    assert said.startswith(f"{spam.event_id} is stored at position ")
    assert not (await store.events([spam.event_id]))[spam.event_id].soft_failed
    [record] = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert record.message == f"chief runs the action readmit: event={spam.event_id}"


async def test_a_request_of_another_site_is_refused(
    store: Store, site: Served, refused: tuple[RoomBuilder, BuiltEvent]
) -> None:
    _, spam = refused
    form = await form_of(site, "readmit", event=spam.event_id)
    own = {"Origin": site.url, "Sec_Fetch_Site": "same-origin"}
    for wrong in (
        form | {"signature": ""},
        form | {"signature": "0" * 64},
        form | {"event": "$other"},
        form | {"action": "drop-caches"},
        {key: value for key, value in form.items() if key != "signature"},
    ):
        assert (await ran(site, wrong)).status == 400
    for header in (
        {"Origin": "https://evil.test"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"X_Operator": "somebody else"},
    ):
        assert (await ran(site, form, **own | header)).status == 400
    assert (await store.events([spam.event_id]))[spam.event_id].soft_failed
    assert (await ran(site, form | {"event": "x" * 20_000})).status == 400
    assert (await ran(site, form, **own)).status == 303


async def test_a_viewer_who_may_only_look(site: Served) -> None:
    headers = {"X-Operator": "clerk"}
    for path in ("/actions", "/actions/confirm?action=drop-caches"):
        assert (await site.send("GET", site.url + path, headers=headers)).status == 400
    form = await form_of(site, "drop-caches")
    assert (await ran(site, form, X_Operator="clerk")).status == 400
    page = await site.send("GET", site.url, headers=headers)
    assert "/actions" not in page.text


async def test_gaps_are_retried(store: Store, site: Served) -> None:
    room = RoomBuilder("11", seed=2)
    room.start(ALICE)
    missing = room.message(ALICE)
    late = room.message(ALICE)
    await store.append([event.pdu for event in room.events if event not in (missing, late)])
    state = list((await store.current_state(room.room_id)).values())
    await store.append([late.pdu], state_before={late.event_id: state})
    await store.gap_failed(room.room_id, [missing.event_id], "timeout", server_names=["s2.test"])
    [gap] = await store.gaps(room.room_id)
    assert gap.retry_after_ms > 0
    assert "s2.test" in await result_of(site, "retry-gaps", server="s2.test")
    [gap] = await store.gaps(room.room_id)
    assert gap.retry_after_ms == 0


async def test_caches_are_dropped_in_every_process(store: Store, site: Served, dsn: str) -> None:
    config = storage.Config(cache_reads=True)
    async with storage.open(dsn, server_name=SERVER, instance_name="other", config=config) as other:
        room = RoomBuilder("11", seed=3)
        room.start(ALICE)
        await other.append(room.pdus)
        event_id = room.events[0].event_id
        await other.event(event_id)
        assert len(other.caches.events) == 1
        assert "are emptied" in await result_of(site, "drop-caches")
        position = store.streams["caches"].positions()["maintenance"]
        while other.streams["caches"].positions().get("maintenance", 0) < position:
            await other.notifier.wait([], after=storage.streams.SyncToken(), timeout_ms=20)
        assert len(other.caches.events) == 0


async def test_a_room_is_verified(
    site: Served, refused: tuple[RoomBuilder, BuiltEvent], owner: asyncpg.Connection
) -> None:
    room, _ = refused
    await result_of(site, "verify", room=room.room_id)
    await site.inspector.tasks.ended()
    page = await site.get("/actions")
    assert 'data-state="done"' in page.text
    assert "0 lines" in page.text
    await owner.execute("UPDATE rooms SET joined_count = joined_count + 1")
    await result_of(site, "verify", room=room.room_id)
    await site.inspector.tasks.ended()
    [task, _] = site.inspector.tasks.latest
    assert (task.state, task.line_count) == ("done", 1)
    assert "member_counts" in task.lines[0]


async def test_jobs_are_run(site: Served, owner: asyncpg.Connection) -> None:
    assert "have begun" in await result_of(site, "jobs")
    await site.inspector.tasks.ended()
    assert site.inspector.tasks.latest[0].state == "done"
    await owner.execute(
        "INSERT INTO background_jobs (name, revision, registered_ts) VALUES ('gone', '1', 1)"
    )
    await result_of(site, "jobs")
    await site.inspector.tasks.ended()
    assert "in no migration of this release" in site.inspector.tasks.latest[0].state


async def test_one_long_action_at_a_time(
    site: Served, refused: tuple[RoomBuilder, BuiltEvent], owner: asyncpg.Connection
) -> None:
    room, _ = refused
    form = await form_of(site, "verify", room=room.room_id)
    async with owner.transaction():
        await owner.execute("LOCK TABLE events")  # it waits for this
        assert (await ran(site, form)).status == 303
        assert (await ran(site, form)).status == 400
    await site.inspector.tasks.ended()
    assert (await ran(site, form)).status == 303
    await site.inspector.tasks.ended()


async def test_wrong_fields(site: Served) -> None:
    for action, fields in [
        ("readmit", {"event": "x"}),
        ("readmit", {"event": "$nothing"}),
        ("retry-gaps", {"server": "@a"}),
        ("verify", {"room": "x"}),
    ]:
        answer = await ran(site, await form_of(site, action, **fields))
        assert answer.status in {400, 404}
    assert (await site.get("/actions/confirm", action="nothing")).status == 400
    assert (await site.get("/actions/confirm", action="readmit")).status == 400
    assert (await site.get("/actions/run")).status == 405
