"""The virtual environment of the peer: made on first use, in the user's cache folder, from the package registry that pip is set up for."""

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
"""The folder of an environment that has these already, to be used as it is."""


def interpreter() -> Path:
    """The Python that has the peer; its environment is made if it is not there."""
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
        / f"peer-{REQUIREMENTS[0].replace('==', '-')}-py{sys.version_info.major}.{sys.version_info.minor}"
    )


def _make(folder: Path) -> None:
    """Whole or not at all: it is made beside its place, and moved there by a symbolic link, as environments hold their own paths."""
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
