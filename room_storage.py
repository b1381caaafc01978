"""The command `room-storage`, with a clean Ctrl-C while the package is imported.

That takes a second, in which Python would answer with a traceback. `import storage` is the library.
"""

import os
import signal
from types import FrameType


def main() -> int:
    """Run the command and return its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    from storage.cli import main as command  # noqa: PLC0415  # the second

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)
    try:
        return command()
    except KeyboardInterrupt:  # before or after the command handles it
        return 128 + signal.SIGINT


def _end(number: int, _: FrameType | None) -> None:
    """End the process. Nothing has begun, and an exception could be lost in an import."""
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
