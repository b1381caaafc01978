"""Each file, command, option, setting and call that a page names exists."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
import typer
from typer.core import TyperGroup

import storage
from docs.generate.settings import read_variables
from storage.cli.app import app
from storage.config import OTHER_VARIABLES, Config
from tests.docs.markdown import ROOT, blocks, name_of, pages

PAGES = pages()
CODE: Final = re.compile(r"`([^`\n]+)`")
FILE: Final = re.compile(
    r"(?:storage|tests|migrations|benchmarks|docs|examples|\.ci|\.github)/[\w/.-]*\w/?"
)
COMMAND: Final = re.compile(r"\broom-storage((?: +[^\s|;&>`#)]+)+)")
LINE_CONTINUES: Final = re.compile(r"\\\n\s*(?:> )?")
MADE: Final = ("benchmarks/results", "docs/index.html")
"""Files that a command writes."""

SETTINGS: Final = (
    OTHER_VARIABLES | read_variables() | {f"STORAGE_{one.name.upper()}" for one in fields(Config)}
)
OF_TESTS: Final = re.compile(
    r"STORAGE_((TEST|BENCH|PLAN)_\w+|ROOMS|EXAMPLES|FUZZ|DAMAGES|LARGE_ROOM|FIELD)$"
)


def code_spans(text: str) -> Iterator[str]:
    """Yield the inline code of a page."""
    yield from CODE.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words after `room-storage`, of inline code and of programs for the shell."""
    shells = [b.code for b in blocks(text) if b.language in {"bash", "console"}]
    for code in [*code_spans(text), *shells]:
        for found in COMMAND.findall(LINE_CONTINUES.sub(" ", code)):
            yield found.split()


def wrong_words(words: list[str]) -> Iterator[str]:
    """Yield the subcommand or the options that `room-storage` does not have."""
    command: Any = typer.main.get_command(app)
    is_value = False
    for position, word in enumerate(words):
        name = word.strip("[].,:'\"")
        if is_value:
            is_value = False
            continue
        if isinstance(command, TyperGroup) and not name.startswith("-"):
            if not re.fullmatch(r"[a-z][a-z-]*", name):
                return
            if name not in command.commands:
                yield " ".join(words[: position + 1])
                return
            command = command.commands[name]
        elif option := re.match(r"--?[a-z][\w-]*", name):
            known = {
                one for param in command.params for one in (*param.opts, *param.secondary_opts)
            }
            if option[0] not in known | {"--help", "-h"}:
                yield " ".join(words[: position + 1])
            is_value = isinstance(command, TyperGroup) and takes_value(command, option[0])


def takes_value(group: TyperGroup, option: str) -> bool:
    """Return whether the next word is the value of this option, and no command."""
    return any(option in param.opts and not getattr(param, "is_flag", 0) for param in group.params)


def missing_files(texts: Iterable[str]) -> list[str]:
    named = {match[0] for text in texts for match in FILE.finditer(text) if match[0] == text}
    return sorted(n for n in named if not n.startswith(MADE) and not (ROOT / n).exists())


def unknown_settings(text: str) -> list[str]:
    named = set(re.findall(r"\bSTORAGE_[A-Z][A-Z_]*[A-Z]\b", text))
    return sorted(name for name in named - SETTINGS if not OF_TESTS.match(name))


def unknown_names(texts: Iterable[str]) -> Iterator[str]:
    """Yield the calls of a store, fields of `Config` and public names that do not exist."""
    for text in texts:
        match re.match(r"(store|Config|storage)\.(\w+)", text):
            case None:
                continue
            case found if found[1] == "store":
                known = hasattr(storage.Store, found[2]) or found[2] in OF_STORES
            case found if found[1] == "Config":
                known = hasattr(Config, found[2])
            case found:
                known = found[2][0].islower() or hasattr(storage, found[2])
        if not known:
            yield found[0]


OF_STORES: Final = {
    "account_data",
    "caches",
    "database",
    "notifier",
    "receipts",
    "streams",
    "to_device",
    "writer",
}
"""Attributes that a store gets when it is made."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    assert missing_files(code_spans(text)) == []
    assert [wrong for words in commands(text) for wrong in wrong_words(words)] == []
    assert unknown_settings(text) == []
    assert list(unknown_names(code_spans(text))) == []


def test_links_of_the_readme_lead_to_files() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_what_does_not_exist_is_found() -> None:
    assert missing_files(["storage/errors.py", "storage/no.py", "docs/", "x storage/no2.py"]) == [
        "storage/no.py"
    ]
    page = (
        "`room-storage no` `room-storage gc --no`\n```bash\nroom-storage purge \\\n  --nor\n```\n"
    )
    wrong = [word for words in commands(page) for word in wrong_words(words)]
    assert wrong == ["no", "gc --no", "purge --nor"]
    page = "`room-storage spark import x --server-name y`, `room-storage --help`, room-storage is"
    assert [word for words in commands(page) for word in wrong_words(words)] == []
    page = "`room-storage --log-level debug no`, `room-storage --version`, `room-storage --no x`"
    wrong = [word for words in commands(page) for word in wrong_words(words)]
    assert wrong == ["--log-level debug no", "--no", "--no x"]
    assert unknown_settings("STORAGE_POOL_SIZE_MAX STORAGE_NOTHING") == ["STORAGE_NOTHING"]
    named = ["store.sync(user)", "store.no()", "Config.no", "storage.Sync", "storage.No"]
    assert list(unknown_names(named)) == ["store.no", "Config.no", "storage.No"]
