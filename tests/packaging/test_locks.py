"""The locks: every package once per platform, with hashes, and no address of a registry."""

import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
LOCK: Final = ROOT / ".ci" / "requirements.lock"
DEMO: Final = ROOT / ".ci" / "demo.lock"
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PIN: Final = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?P<marker> ; [^\\\n]+)? \\\n"
    r"(?P<hashes>(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
    re.MULTILINE,
)


def pins(lock: Path) -> dict[tuple[str, str], str]:
    """Versions by name and marker."""
    return {
        (match["name"], (match["marker"] or "").strip(" ;")): match["version"]
        for match in PIN.finditer(lock.read_text("utf-8"))
    }


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", one)[0].lower() for one in requirements}


@pytest.mark.parametrize("lock", [LOCK, DEMO], ids=lambda lock: lock.name)
def test_every_line_of_a_lock_is_a_pin_or_its_hash(lock: Path) -> None:
    text = lock.read_text("utf-8")
    assert PIN.sub("", text) == ""
    assert len(pins(lock)) == len(PIN.findall(text)) > 30


def test_the_locks_have_all_that_the_project_names() -> None:
    extras = PROJECT["optional-dependencies"]
    runtime = names(PROJECT["dependencies"] + extras["embedded"])
    everything = names([*PROJECT["dependencies"], *(one for own in extras.values() for one in own)])
    assert runtime <= {name for name, _ in pins(DEMO)}
    assert everything - {"room-storage"} <= {name for name, _ in pins(LOCK)}


def test_the_demo_has_the_versions_of_development() -> None:
    development = {(name, version) for (name, _), version in pins(LOCK).items()}
    assert {(name, version) for (name, _), version in pins(DEMO).items()} <= development


def test_tools_of_development_are_not_installed_for_the_demo() -> None:
    assert not {"pytest", "mypy", "ruff", "pyspark", "uv"} & {name for name, _ in pins(DEMO)}
