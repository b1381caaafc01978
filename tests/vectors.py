"""Where the published conformance vectors are.

They belong to other Matrix projects and are not part of this repository: $STORAGE_VECTORS names
their folder, else it is `../shared/vectors` from the project root. Without them the tests that need
them are skipped.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parent.parent


def vectors_folder() -> Path:
    """The folder; skips the test, or at import the whole module, where there is none."""
    named = os.environ.get("STORAGE_VECTORS")
    folder = Path(named) if named else _ROOT.parent / "shared" / "vectors"
    if named and not folder.is_dir():
        raise FileNotFoundError(f"STORAGE_VECTORS={named} is no folder")
    if not folder.is_dir():
        pytest.skip(
            f"no conformance vectors in {folder}; set STORAGE_VECTORS", allow_module_level=True
        )
    return folder


def vectors(name: str) -> Any:
    """The JSON of one file, such as "gomatrixserverlib/event_ids.json"."""
    return json.loads((vectors_folder() / name).read_text("utf-8"))
