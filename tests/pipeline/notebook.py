"""Runs the cells of a notebook in this process, as one program."""

import json
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

NOTEBOOK: Final = Path(__file__).parents[2] / "examples" / "rooms_in_numbers.ipynb"


def cells() -> list[str]:
    """The code of its cells."""
    listed = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return ["".join(one["source"]) for one in listed if one["cell_type"] == "code"]


def run() -> dict[str, Any]:
    """Run the cells, without a window for pictures; return their variables."""
    mpl.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(cells()):
        exec(compile(code, f"{NOTEBOOK.name}[{number}]", "exec"), names)
    return names
