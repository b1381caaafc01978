"""Small file systems, for tests of a full disk."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(size: str) -> Iterator[Path]:
    """Mount a file system of this size, such as "12k"; skip the test for all but root.

    Other users may read it, such as that of a Postgres server.
    """
    place = Path(tempfile.mkdtemp(prefix="storage-small-disk-"))
    place.chmod(0o755)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(place)],
        check=False,
        capture_output=True,
    )
    if made.returncode != 0:
        place.rmdir()
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        place.rmdir()


def grow(place: Path, size: str) -> None:
    """Give a mounted file system more room."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)
