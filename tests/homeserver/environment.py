"""The environment of Synapse, which the tests start as a process and never import.

    python -m tests.homeserver.environment

makes it once, in the user's cache folder. STORAGE_TEST_SYNAPSE names another environment.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

REQUIREMENT: Final = "matrix-synapse==1.163.2"
VARIABLE: Final = "STORAGE_TEST_SYNAPSE"


def folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = ".".join(map(str, sys.version_info[:2]))
    name = f"{REQUIREMENT.replace('==', '-')}-py{python}"
    return Path(os.environ.get(VARIABLE) or cache / "room-storage" / name)


def interpreter() -> Path | None:
    """The Python that has Synapse, or None."""
    python = folder() / "bin" / "python"
    return python if python.exists() else None


def make() -> None:
    """Make the environment whole or not at all. Environments contain their own paths: link it."""
    place = folder()
    place.parent.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
    uv: list[str | Path] = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, own], check=True)
    install = [*uv, "pip", "install", "--quiet", "--python", own / "bin" / "python", REQUIREMENT]
    subprocess.run(install, check=True)
    place.symlink_to(own.name, target_is_directory=True)


if __name__ == "__main__" and interpreter() is None:
    make()
