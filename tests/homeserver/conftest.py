"""The example and Synapse, once for all tests of this folder."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import pytest
import pytest_asyncio

from tests.conftest import _fresh_database
from tests.homeserver import environment
from tests.homeserver.processes import ServerProcess, User, example, running, synapse


@dataclass
class World:
    """Both servers, the database of the example, and two users of each server."""

    ours: ServerProcess
    theirs: ServerProcess
    dsn: str
    alice: User
    anna: User
    sid: User
    sue: User


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    server_dsn: str,
    template_name: str,
    worker_id: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[World]:
    python = environment.interpreter()
    if python is None:
        pytest.skip(
            f"there is no environment with Synapse in {environment.folder()}: "
            "python -m tests.homeserver.environment"
        )
    folder = tmp_path_factory.mktemp("federation")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        dsn = await enter(_fresh_database(server_dsn, template_name, f"{worker_id}_federation"))
        theirs = synapse(folder / "theirs", python)
        ours = example(folder / "ours", dsn, theirs.folder / "certificate.pem")
        await enter(running(theirs))
        await enter(running(ours))
        session = await enter(aiohttp.ClientSession())
        users = [await ours.user(session, name) for name in ("alice", "anna")]
        users += [await theirs.user(session, name) for name in ("sid", "sue")]
        yield World(ours, theirs, dsn, *users)
