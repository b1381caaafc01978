"""The command `room-storage`. Each command is a module of this package; `app` lists them."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

__all__ = ["end_at_once", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; Ctrl-C is clean from here on.

    While `app` is imported, Python would answer it with a traceback.
    """
    before = signal.getsignal(signal.SIGINT)
    is_first = "storage.cli.app" not in sys.modules and before is not signal.SIG_IGN
    if is_first:
        signal.signal(signal.SIGINT, end_at_once)
    from storage.cli.app import main as command  # noqa: PLC0415  # see above

    if is_first:
        signal.signal(signal.SIGINT, before)
    try:
        return command(arguments)
    except KeyboardInterrupt:  # before or after the command handles it
        return 128 + signal.SIGINT


def end_at_once(number: int, _: FrameType | None) -> None:
    """End the process while it imports: nothing has begun, and an import may lose an exception."""
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
