"""The README is short. Its program runs, its links lead to files, and its versions are true."""

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

import storage
from tests.docs.markdown import README_LINES_MAX

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS: Final = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= README_LINES_MAX


def test_the_quick_start_runs(
    dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints what it says, and the second time that all events are duplicates."""
    program, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    opened = storage.open
    monkeypatch.setattr(storage, "open", lambda **how: opened(dsn, **how))
    for outcome in ("stored", "duplicate"):
        names: dict[str, Any] = {"__name__": "quick_start"}
        exec(compile(program.replace("asyncio.run(main())", ""), "README.md", "exec"), names)
        asyncio.run(names["main"]())
        printed = capsys.readouterr().out
        assert printed.count(f"{outcome} $") == 8
        assert "The key hangs behind the door." in printed


def test_its_links_lead_to_files() -> None:
    links = LINKS.findall(README)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_each_promise_has_a_proof() -> None:
    table = README.split("## Six promises")[1].split("\n\n")[1].splitlines()
    promises = [line.split("|")[1:3] for line in table[2:]]
    assert len(promises) == 6
    assert [promise for promise, proof in promises if not LINKS.search(proof)] == []


def test_its_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z-]+)", README))
    assert len(named) > 3
    assert [name for name in named if not re.search(f"^{name}:", makefile, re.MULTILINE)] == []


def test_its_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    language = "Programming Language :: Python :: "
    minors = [
        int(one.removeprefix(language).partition(".")[2])
        for one in project["classifiers"]
        if one.startswith(f"{language}3.")
    ]
    assert f"Version {project['version']} · " in README
    assert f" · Python 3.{min(minors)} to 3.{max(minors)} · " in README
