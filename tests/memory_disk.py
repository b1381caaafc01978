"""A folder in memory for the session's Postgres.

Each test has a database of its own. To copy one takes 20 ms in memory, and up to 500 ms on the disk
of a virtual machine.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Final

import psutil

from storage.database.embedded import EmbeddedPostgres

MEMORY_DISK: Final = Path("/dev/shm")
PREFIX: Final = "storage-tests-"
YOUNG_SECONDS: Final = 60
"""A folder this young may belong to a server that is starting."""

FREE_BYTES_MIN: Final = 6 * 2**30
"""Less than this and the cluster stays on the disk: the tests of a million events need 3 GB."""


def cluster_folder(session_folder: Path) -> Path:
    """The folder of the cluster of a session; the same for all its workers."""
    name = hashlib.sha256(bytes(session_folder)).hexdigest()[:16]
    in_memory = MEMORY_DISK / f"{PREFIX}{name}"
    on_disk = session_folder / "postgres"
    if in_memory.exists() or (not on_disk.exists() and _has_room()):
        return in_memory
    return on_disk


def _has_room() -> bool:
    if not MEMORY_DISK.is_dir():
        return False
    free: int = min(shutil.disk_usage(MEMORY_DISK).free, psutil.virtual_memory().available)
    return free >= FREE_BYTES_MIN


def remove_abandoned() -> None:
    """Stop and remove the clusters in memory of sessions that were killed."""
    for folder in MEMORY_DISK.glob(f"{PREFIX}*"):
        if time.time() - folder.stat().st_mtime > YOUNG_SECONDS and not _is_used(folder):
            pid = EmbeddedPostgres(folder).pid
            if pid is not None:
                server = psutil.Process(pid)
                server.send_signal(signal.SIGINT)  # a fast shutdown
                server.wait(timeout=30)
            shutil.rmtree(folder, ignore_errors=True)


def _is_used(folder: Path) -> bool:
    """Whether a process has the shared lock of `EmbeddedPostgres`."""
    lock = os.open(folder / "users", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)
