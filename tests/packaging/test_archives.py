"""The wheel has what an application needs; the source distribution is a checkout."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

import pytest

from tests.cli.running import environment
from tests.long_run import long_run
from tests.packaging.test_locks import PROJECT, ROOT

NEEDED_BY_MAKE: Final = {
    ".ci/demo.lock",
    ".ci/requirements.lock",
    ".ci/run",
    ".ci/sbom.py",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "docs/index.md",
    "examples/first_room.py",
    "mkdocs.yml",
    "pyproject.toml",
}
OUR_OWN: Final = ("storage/", f"room_storage-{PROJECT['version']}.dist-info/")


def built(target: str, folder: Path) -> Path:
    """The archive that `pip` or `uv` would build."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    [archive] = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", tmp_path_factory.mktemp("sdist"))


def files_in(folder: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def contents_of(archive: Path) -> set[str]:
    """The files of a source distribution, without its folder."""
    with tarfile.open(archive) as tar:
        return {one.name.split("/", 1)[1] for one in tar.getmembers() if one.isfile()}


def test_the_wheel_has_the_package_and_its_migrations(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert [name for name in names if not name.startswith(OUR_OWN)] == []
    inside = {name for name in names if name.startswith("storage/")}
    carried = files_in("migrations") | {"examples/first_room.py"}
    assert inside == files_in("storage") | {f"storage/{one}" for one in carried}
    assert {"storage/py.typed", "storage/migrations/env.py", "storage/database/schema.sql"} < inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{OUR_OWN[-1]}METADATA").decode()
    return HeaderParser().parsestr(text)


def test_the_metadata_of_the_wheel(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Name"] == "room-storage"
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    extras = set(metadata.get_all("Provides-Extra") or ())
    assert {"embedded", "inspector", "lake", "redis", "spark", "tracing"} <= extras
    plain = [one for one in metadata.get_all("Requires-Dist") or () if "extra ==" not in one]
    assert not [one for one in plain if re.match(r"psutil|pixeltable|redis|pyspark|opentel", one)]
    assert len(plain) == len(PROJECT["dependencies"])
    assert metadata.get_all("Project-URL")


def test_the_source_distribution_is_a_checkout(sdist: Path) -> None:
    names = contents_of(sdist)
    assert names >= NEEDED_BY_MAKE
    ignored = re.compile(r"(^|/)(\.git|\.venv|__pycache__|\.\w+_cache|build|dist)/")
    assert [name for name in names if ignored.search(name)] == []
    if shutil.which("git") and (ROOT / ".git").exists():
        tracked = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        assert {name for name in tracked if (ROOT / name).exists()} <= names


@pytest.mark.slow
@pytest.mark.timeout(900)
@long_run
def test_the_source_distribution_runs_the_demo(sdist: Path, tmp_path: Path) -> None:
    """In an empty folder, with an environment of its own."""
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    done = subprocess.run(
        ["make", "demo", f"PYTHON={sys.executable}"],
        cwd=folder,
        env=environment(STORAGE_DATA_DIR=str(tmp_path / "data"), TERM=os.environ.get("TERM", "")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[\d,]+ events in \d+ rooms", done.stdout)
