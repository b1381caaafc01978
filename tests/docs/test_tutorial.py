"""The tutorial, typed into `python -m asyncio`: it prints what the page says.

The pages for authors can be typed, too, and nothing in them is hidden.
"""

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.cli.running import ROOT, environment, room_storage
from tests.docs.markdown import blocks

PAGE: Final = (ROOT / "docs" / "tutorial" / "index.md").read_text(encoding="utf-8")
BLOCK: Final = re.compile(r"^```(python|text|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROMPTS: Final = re.compile(r"^((>>>|\.\.\.) )+")
LEAVES: Final = "exit()\n"
FOR_AUTHORS: Final = ("a-message-from-a-client.md", "joins-invites-gaps.md")


def typed_and_printed() -> tuple[str, list[str]]:
    """Return all blocks of Python, and the lines that the page shows after them."""
    code, lines, before = "", [], ""
    for language, text in BLOCK.findall(PAGE):
        if language == "python":
            code += text
        elif language == "text" and before == "python":
            lines += text.splitlines()
        before = language
    return code, lines


def commands() -> list[tuple[list[str], list[str]]]:
    """Return each command whose output the page shows, with the lines of it."""
    found = BLOCK.findall(PAGE)
    return [
        (shlex.split(code)[1:], text.splitlines())
        for (language, code), (after, text) in itertools.pairwise(found)
        if (language, after) == ("bash", "text")
    ]


def session(code: str, folder: Path) -> list[str]:
    """Type the code into a new prompt, and return the printed lines."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncio"],
        input=code + LEAVES,
        cwd=folder,
        env=environment(STORAGE_DATA_DIR=str(folder / "data"), PYTHON_BASIC_REPL="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stdout + done.stderr, done.stderr
    return [line for each in done.stdout.splitlines() if (line := PROMPTS.sub("", each))]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_tutorial_prints_what_it_says(tmp_path: Path) -> None:
    """Type all of it, then in a new process the part after the restart, then the commands."""
    code, lines = typed_and_printed()
    assert len(lines) > 12
    assert session(code, tmp_path) == lines
    first, opening, rest = code.partition("import contextlib, storage\n")
    assert first
    [last] = session(opening + rest, tmp_path)  # after a true restart
    assert last == lines[-1]
    assert len(commands()) == 3
    for arguments, shown in commands():
        done = room_storage(*arguments, STORAGE_DATA_DIR=str(tmp_path / "data"))
        assert (done.returncode, [line for line in done.stdout.splitlines() if line in shown]) == (
            0,
            shown,
        ), done.stderr


def test_the_commands_name_an_event_of_the_tutorial() -> None:
    [named] = set(re.findall(r"'(\$[\w-]{43})'", PAGE))
    names: dict[str, object] = {}
    code = re.search(r"^room = RoomBuilder.*?(?=^results)", PAGE, re.DOTALL | re.MULTILINE)
    assert code is not None
    exec(f"from storage.testing import RoomBuilder\n{code[0]}", names)
    assert names["key"].event_id == named  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", FOR_AUTHORS)
def test_a_page_for_authors_can_be_typed(name: str, tmp_path: Path) -> None:
    found = list(blocks((ROOT / "docs" / "how-to" / name).read_text(encoding="utf-8")))
    typed = [block for block in found if block.language == "python"]
    assert len(typed) > 8
    assert [block.line for block in found if block.hidden] == []
    session("\n".join(block.code for block in typed), tmp_path)
