"""Tests that share something costly run in one worker.

Releases of pytest and pytest-xdist may not go together.
"""

import pytest


@pytest.mark.xdist_group("groups")
def test_a_group_is_kept_together(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("not run with --dist loadgroup")
    assert request.node.nodeid.endswith("@groups")
