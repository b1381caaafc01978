"""Type checkers on the built wheel: a user's program is strict, and the interface is typed."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

import pytest

from tests.packaging.test_archives import built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM: Final = Path(__file__).parent / "typed_program.py"
COMPLETE: Final = 0.98
MISTAKE: Final = """
import storage

async def wrong(store: storage.Store) -> int:
    await store.append(3)
    return await store.sync("@a:s1.test")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and the packages of this environment behind it."""
    folder = tmp_path_factory.mktemp("types")
    wheel = built("wheel", folder / "wheel")
    environment = folder / "environment"
    uv = (sys.executable, "-m", "uv")
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    subprocess.run(
        [*uv, "pip", "install", "--quiet", "--no-deps", "--python", environment, wheel], check=True
    )
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return environment


def checked(installed: Path, *command: object, folder: Path) -> "subprocess.CompletedProcess[str]":
    """A run of a checker for the environment, outside the checkout."""
    path = f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_program_of_a_user_is_strict(installed: Path, tmp_path: Path, checker: str) -> None:
    command: tuple[object, ...] = ("pyright", "--pythonpath", installed / "bin" / "python")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    if checker == "mypy":
        command = ("mypy", "--strict", "--python-executable", installed / "bin" / "python")
    shutil.copy(PROGRAM, tmp_path / "program.py")
    done = checked(installed, *command, "program.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "wrong.py").write_text(MISTAKE, encoding="utf-8")
    refused = checked(installed, *command, "wrong.py", folder=tmp_path)
    assert refused.returncode == 1
    assert "Iterable" in refused.stdout
    assert "Sync" in refused.stdout


def test_the_public_interface_is_typed(installed: Path, tmp_path: Path) -> None:
    done = checked(
        installed,
        *("pyright", "--outputjson", "--ignoreexternal", "--verifytypes", "storage"),
        folder=tmp_path,
    )
    found = json.loads(done.stdout)["typeCompleteness"]
    assert found["packageRootDirectory"].startswith(str(installed))
    counts = found["exportedSymbolCounts"]
    assert counts["withKnownType"] > 1_000
    assert found["completenessScore"] >= COMPLETE, counts
