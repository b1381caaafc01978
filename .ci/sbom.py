"""Write the software bill of materials of the wheel, as CycloneDX JSON: `sbom.py FILE`.

It lists what `pip install 'room-storage[embedded]'` installs from the locked versions, each package
with its version, licence and address. A temporary environment has these packages only, so the
tools of development are not listed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LOCK: Final = ROOT / ".ci" / "demo.lock"
INSTALL: Final = ("install", "--quiet", "--constraint", LOCK)


def main() -> None:
    """Install the package into a temporary environment, and describe that."""
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="room-storage-sbom-") as folder:
        environment = Path(folder) / "environment"
        module("uv", "venv", "--quiet", "--python", sys.executable, environment)
        module("uv", "pip", *INSTALL, "--python", environment, f"{ROOT}[embedded]")
        module(
            "cyclonedx_py",
            "environment",
            *(
                "--pyproject",
                ROOT / "pyproject.toml",
                "--output-reproducible",
                "--gather-license-texts",
            ),
            *("--output-file", file, environment),
        )


def module(name: str, *arguments: object) -> None:
    """Run a module of the environment of development; stop if it fails."""
    subprocess.run([sys.executable, "-m", name, *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
