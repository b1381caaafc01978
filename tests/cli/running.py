"""`python -m storage` as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "postgresql://postgres@127.0.0.1:1/nowhere"


def environment(**environ: str) -> dict[str, str]:
    """This process's, without any setting of ours, and with these."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STORAGE_")} | environ


def room_storage(*arguments: str, given: bytes = b"", **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; ``given`` is its standard input."""
    done = subprocess.run(
        [sys.executable, "-m", "storage", *arguments], cwd=ROOT, env=environment(**environ), check=False, capture_output=True, input=given
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def started(*arguments: str, **environ: str) -> "subprocess.Popen[bytes]":
    """A command that is still running, with pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "storage", *arguments],
        cwd=ROOT,
        env=environment(**environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
