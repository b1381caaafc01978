"""The peer's virtual environment, created on first use in the user's cache folder.

It is installed from the package registry that pip is configured for.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Final

from benchmarks.harness import note

REQUIREMENTS: Final = ("matrix-synapse==1.163.2", "psycopg2-binary>=2.9.10,<3")
VARIABLE: Final = "STORAGE_BENCH_PEER"
"""The folder of an existing environment with these packages, used unchanged."""


def interpreter() -> Path:
    """Return the Python that has the peer; create its environment if it is missing."""
    given = os.environ.get(VARIABLE)
    folder = Path(given) if given else _folder()
    python = folder / "bin" / "python"
    if not python.exists():
        if given:
            raise FileNotFoundError(f"{VARIABLE}: there is no {python}")
        _make(folder)
    return python


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (
        cache
        / "room-storage"
        / f"peer-{REQUIREMENTS[0].replace('==', '-')}-py{'.'.join(map(str, sys.version_info[:2]))}"
    )


def _make(folder: Path) -> None:
    """Create the environment whole or not at all.

    It is created next to its folder and linked there, because environments contain their own paths.
    """
    note(f"installing {' '.join(REQUIREMENTS)} into {folder}, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    venv.create(own, with_pip=True)
    subprocess.run(
        [
            own / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *REQUIREMENTS,
        ],
        check=True,
    )
    folder.symlink_to(own.name, target_is_directory=True)
