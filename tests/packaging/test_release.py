"""The metadata of a release agree: pyproject.toml, the installed package, CHANGELOG.md."""

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest

import storage
from storage.cli import main

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
    "project"
]
CHANGELOG: Final = (ROOT / "CHANGELOG.md").read_text("utf-8")
RELEASE: Final = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)
FORMER_NAME: Final = "room-event-" + "storage"
"""Kept where a running database or its clients know it, and where the changelog explains it."""

KEPT: Final = {"CHANGELOG.md", "migrations/env.py", "storage/testing/assembly.py"}


def test_the_version_is_stated_once() -> None:
    assert PROJECT["version"] == storage.__version__ == metadata.version("room-storage")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"room-storage {PROJECT['version']}\n"


def test_the_changelog_has_the_release_with_its_date() -> None:
    (first, undated), (latest, date), *_ = RELEASE.findall(CHANGELOG)
    assert (first, undated) == ("Unreleased", "")
    assert latest == PROJECT["version"]
    assert date


def test_distribution_and_command_have_one_name() -> None:
    assert PROJECT["name"] == "room-storage"
    assert PROJECT["scripts"] == {"room-storage": "storage.cli:main"}


def test_the_former_name_is_gone() -> None:
    texts = [
        path
        for folder in ("storage", "migrations", "benchmarks", "docs", "tests", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".sql", ".json", ".yml", ".toml", ".lock"}
        and "results" not in path.parts
    ]
    texts += [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml"}]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in texts
        if FORMER_NAME in path.read_text("utf-8", errors="replace")
    }
    assert found == KEPT


def test_the_addresses_are_complete_and_none_is_a_placeholder() -> None:
    addresses = PROJECT["urls"].values()
    assert all(one.startswith("https://") for one in addresses)
    assert not any(re.search(r"example|localhost|placeholder|\.test\b", one) for one in addresses)


def test_the_versions_of_python_agree() -> None:
    """Classifiers, requires-python and the tools; `test_project_files` compares the workflow."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert claimed == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == f">={claimed[0]}"
    assert document["tool"]["mypy"]["python_version"] == claimed[0]
    assert document["tool"]["ruff"]["target-version"] == f"py{claimed[0].replace('.', '')}"
    assert f"Python {claimed[0]} to {claimed[-1]}" in CHANGELOG
