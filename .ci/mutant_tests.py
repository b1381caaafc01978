"""A pytest plugin for `make mutants`: run only the tests of the mutant's folder, quick ones first.

The tests of a layer are in its own folder, so most mutants are found within a second.
"""

import json
import os
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Stop random tests at the first failing example: shrinking it has no use here."""
    # hypothesis must load its own pytest plugin first
    from hypothesis import Phase, settings  # noqa: PLC0415

    settings.register_profile(
        "mutants", phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False
    )
    settings.load_profile("mutants")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the mutant's folder; sort by the time of their file, then by their own."""
    layer = os.environ.get("MUTANT_UNDER_TEST", "").split(".")
    if layer[0] != "storage":
        return  # mutmut counts or lists the tests
    own = [
        item for item in items if item.path.relative_to(Path.cwd()).parts[:2] == ("tests", layer[1])
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in own])
    took: dict[str, float] = json.loads(Path("mutmut-stats.json").read_text("utf-8"))[
        "duration_by_test"
    ]
    files = {str(item.path): 0.0 for item in own}
    for item in own:
        files[str(item.path)] += took.get(item.nodeid, 0.0)
    items[:] = sorted(own, key=lambda item: (files[str(item.path)], took.get(item.nodeid, 0.0)))
