"""Tests that take half a minute or more, and run in `make soak` only."""

import os
from typing import Final

import pytest

long_run: Final = pytest.mark.skipif(
    "STORAGE_EXAMPLES" not in os.environ, reason="a long test: `make soak`, or STORAGE_EXAMPLES"
)
