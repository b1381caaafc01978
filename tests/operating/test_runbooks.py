"""Each alert names its runbook, and each runbook its alert and things that exist.

`tests/docs` runs the blocks of these pages, and checks their commands and settings.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.operating.test_docs import DOCS, dashboard, rules

RUNBOOKS = DOCS / "runbooks"
HEADINGS = ["What it means", "What to look at", "What to do", "When it is over"]
ALERT = re.compile(r"\bRoomStorage[A-Z]\w+")
QUOTED = re.compile(r'"([A-Z][^"\n]+)"')


def kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def alert_name(rule: dict[str, Any]) -> str:
    return str(rule["alert"])


def page_of(rule: dict[str, Any]) -> Path:
    return DOCS.parent / str(rule["annotations"]["runbook"])


@pytest.mark.parametrize("rule", rules(), ids=alert_name)
def test_an_alert_names_its_page(rule: dict[str, Any]) -> None:
    name = alert_name(rule)
    page = page_of(rule)
    assert rule["annotations"]["runbook"] == f"docs/runbooks/{kebab(name)}.md"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert f"[{name}]({page.name}) | {rule['labels']['severity']} |" in (
        RUNBOOKS / "index.md"
    ).read_text(encoding="utf-8")


def test_each_page_has_its_alert() -> None:
    pages = {path for path in RUNBOOKS.glob("*.md") if path.name != "index.md"}
    assert pages == {page_of(rule) for rule in rules()}


def titles() -> set[str]:
    """The titles of panels and rows."""
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    return {panel["title"] for panel in board["panels"]}


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Alerts, panels of the dashboard, and metrics."""
    text = page.read_text(encoding="utf-8")
    assert set(ALERT.findall(text)) <= {alert_name(rule) for rule in rules()}
    prose = " ".join(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL).split())
    assert set(QUOTED.findall(prose)) <= titles()
    asked = " ".join([*dashboard(), *(rule["expr"] for rule in rules())])
    assert [name for name in re.findall(r"room_storage_\w+", text) if name not in asked] == []


def test_what_is_not_there_is_found() -> None:
    assert "Nothing at all" not in titles()
    assert QUOTED.findall('The panel "Nothing at all" is quoted, "this" is not.') == [
        "Nothing at all"
    ]
    assert kebab("RoomStorageDown") == "room-storage-down"
