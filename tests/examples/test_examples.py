"""The programs of `examples/`, each as a process, with the built wheel in its own environment."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from storage.database.embedded import embedded_postgres
from tests.cli.running import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES: Final = ROOT / "examples"
LOCK: Final = ROOT / ".ci" / "requirements.lock"
IMPORTED: Final = {"local_events.py"}
"""Modules that the programs import."""

EXPECTED: Final = {
    "first_room.py": [
        "first sync: ['m.room.create', 'm.room.member', 'm.room.power_levels', ",
        "next sync: [{'body': 'And the cellar is locked.', 'msgtype': 'm.text'}]",
        "the last three: ['m.room.message', 'm.room.message', 'm.room.member']",
        "before them: ['m.room.name', 'm.room.history_visibility', 'm.room.join_rules']",
        "a join, a ban, a late message: ['stored', 'stored', 'soft_failed']",
        "Mallory now: ban",
        "Bob sees: 11 of 12 events, the late one: False",
    ],
    "join_over_federation.py": [
        "B stores the invite: stored",
        "B's /sync: {'name': 'Pantry'}",
        "B stores the join: stored",
        "B receives an event: missing_parents 1",
        "B stores them: ['stored', 'stored']",
        "B's page: 3 events, a gap: True",
        "B stores the history: {'stored'}",
        "B's page: 10 events, a gap: False",
        "A receives a message of B: stored",
        "A and B have the same state: True",
    ],
    "message_from_client.py": [
        "again: duplicate",
        "403: sender.not_joined",
        "in /sync: hello",
    ],
    "metrics.py": [
        'room_storage_call_seconds_count{call="append"} 1.0',
        'room_storage_events_total{outcome="stored"} 5.0',
    ],
    "replication_worker.py": [
        "worker: ready",
        *(f"worker: Bob gets message {number}" for number in range(3)),
        "the worker ended with 0",
    ],
}
"""Lines that each program prints, or their beginnings, in this order."""


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and what it requires, without extras."""
    folder = tmp_path_factory.mktemp("examples")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    [wheel] = folder.glob("*.whl")
    uv = (sys.executable, "-m", "uv")
    run(*uv, "venv", "--quiet", "--python", sys.executable, folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    install = (*uv, "pip", "install", "--quiet", "--python", python, "--constraint", LOCK)
    run(*install, wheel, cwd=folder)
    return python


def run(*command: object, cwd: Path, **environ: str) -> str:
    """Run a command and return its output."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        env={**environment(), **environ},
        timeout=240,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_program_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == EXPECTED.keys() | IMPORTED


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"join_over_federation.py"}))
def test_a_program_works_with_the_wheel(
    name: str, python: Path, empty_dsn: str, tmp_path: Path
) -> None:
    printed = run(python, EXAMPLES / name, cwd=tmp_path, STORAGE_DSN=empty_dsn)
    assert_printed(name, printed)
    run(python, EXAMPLES / name, cwd=tmp_path, STORAGE_DSN=empty_dsn)  # also a second time


async def test_two_servers_work_with_the_wheel(
    python: Path, empty_dsn: str, tmp_path: Path
) -> None:
    program = EXAMPLES / "join_over_federation.py"
    async with embedded_postgres(tmp_path / "other") as other:
        assert_printed(program.name, run(python, program, empty_dsn, other, cwd=tmp_path))


def assert_printed(name: str, printed: str) -> None:
    lines = iter(printed.splitlines())
    for wanted in EXPECTED[name]:
        assert any(line.startswith(wanted) for line in lines), f"{wanted!r} is not in\n{printed}"


def test_the_types_of_the_wheel_fit(python: Path, tmp_path: Path) -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", python)
    options = ("--config-file", os.devnull, "--cache-dir", tmp_path / "cache")
    run(*mypy, *options, *programs, cwd=tmp_path, MYPYPATH=str(EXAMPLES))


def test_each_says_what_it_shows() -> None:
    for path in EXAMPLES.glob("*.py"):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith('"""'), path.name
        assert 40 < len(first) <= 100, path.name
