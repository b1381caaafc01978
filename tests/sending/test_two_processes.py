"""Two processes of a homeserver send to one room at the same moment."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process

import pytest

from storage.ids import EventId
from tests.cli.running import ROOT
from tests.maintenance.rooms import findings
from tests.sending.stores import ALICE, opened

pytestmark = pytest.mark.every_postgres

COUNT = 20
SAME = COUNT // 4


async def started(dsn: str, name: str, room_id: str) -> Process:
    """Start a process, and wait until its store is open."""
    module = "tests.sending.sending_process"
    command = (sys.executable, "-m", module, dsn, name, room_id, str(COUNT))
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def test_concurrent_sends_leave_one_extremity(dsn: str) -> None:
    async with opened(dsn) as store:
        room_id = await store.create_room(ALICE)
        processes = [await started(dsn, name, room_id) for name in ("one", "two")]
        answers = await asyncio.gather(*(one.communicate(b"go\n") for one in processes))
        sent = [json.loads(out) for out, _ in answers]
        assert [one.returncode for one in processes] == [0, 0]
        own = [tuple(one) for results in sent for one in results[:COUNT]]
        assert {outcome for _, outcome in own} == {"stored"}
        assert len(own) == len(set(own)) == 2 * COUNT

        same = [results[COUNT:] for results in sent]
        assert [one[0] for one in same[0]] == [one[0] for one in same[1]]
        outcomes = [outcome for results in same for _, outcome in results]
        assert sorted(outcomes) == ["duplicate"] * SAME + ["stored"] * SAME

        assert len(await store.forward_extremities(room_id)) == 1
        ids = {EventId(one[0]) for results in sent for one in results}
        stored = await store.events(ids)
        assert stored.keys() == ids
        assert not any(event.soft_failed or event.rejected for event in stored.values())
        assert await findings(store) == []
