"""What the README promises: its program runs, its commands and files exist."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import storage
from storage.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_quick_start_runs(
    dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    opened = storage.open
    monkeypatch.setattr(storage, "open", lambda **how: opened(dsn, **how))
    names: dict[str, Any] = {"__name__": "quick_start"}
    exec(compile(program.replace("asyncio.run(main())", ""), "README.md", "exec"), names)
    asyncio.run(names["main"]())
    printed = capsys.readouterr().out
    assert printed.count("stored $") == 8
    assert "The key hangs behind the door." in printed


def test_its_files_exist() -> None:
    named = set(re.findall(r"`((?:storage|tests|migrations|benchmarks)/[\w/.]*)`", README)) - {
        "benchmarks/results"
    }
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []
    short = set(re.findall(r"`((?:persist|event|streams|queries)/[\w/]+\.py)`", README))
    assert len(short) > 10
    assert [name for name in short if not (ROOT / "storage" / name).exists()] == []


def test_its_commands_exist() -> None:
    named = set(re.findall(r"^ +(?:cat .* \| )?room-storage ([\w-]+)", README, re.MULTILINE))
    assert named == {one.name for one in app.registered_commands} | {
        one.name for one in app.registered_groups
    }
