"""The page about verification names each check, and whether it has a repair."""

import re
from pathlib import Path

import storage.maintenance.verify
import storage.maintenance.verify.run
from storage.maintenance.verify.event_loader import REMEDIES, REPAIRABLE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "verify.md"
MADE = re.compile(r'(?:room\.finding|Finding)\(\s*"(\w+)"')


def checks() -> set[str]:
    folder = ROOT / "storage" / "maintenance" / "verify"
    found = {name for path in folder.glob("*.py") for name in MADE.findall(path.read_text())}
    return found | {storage.maintenance.verify.run.CHECK}


def rows() -> dict[str, str]:
    """Each check of the table, with its repair."""
    lines = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {
        name: line[2]
        for line in lines
        if len(line) == 3
        for name in re.findall(r"`(\w+)`", line[0])
    }


def test_each_check_is_on_the_page() -> None:
    assert {"state_deltas", "doubled_events"} <= checks()
    assert checks() - rows().keys() == set()


def test_each_check_has_a_repair_or_a_remedy() -> None:
    repaired = {name for name, text in rows().items() if text.startswith("`--repair`")}
    assert repaired == REPAIRABLE
    assert rows().keys() - repaired - {"indexes", "check"} == REMEDIES.keys()
