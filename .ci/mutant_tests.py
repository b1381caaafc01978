"""A plugin of pytest for `make mutants`: a mutant meets the tests of its own folder, the quick ones first.

So what a test means to say about a layer stands next to the other tests of that layer, and most mutants end within a second.
"""

import json
import os
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Have random tests end with the first example that fails: nobody reads a smaller one."""
    from hypothesis import Phase, settings  # noqa: PLC0415  # its own plugin of pytest wants to be imported first

    settings.register_profile(
        "mutants", phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False
    )
    settings.load_profile("mutants")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the mutant's folder; those of quick files come first, and of a file the quick ones."""
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
