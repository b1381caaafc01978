"""Ports for servers whose command line has to name them.

The kernel may give a port that it chose to any connection until the server listens on it, or while
the server is down.
"""

import itertools
import os
import socket
from pathlib import Path
from typing import Final

LOWEST: Final = 10_000
EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that the kernel gives to connections, and to servers that name none: two numbers."""

PER_PROCESS: Final = 64
"""Processes with consecutive ids, as those of xdist, begin this far apart."""

_offsets = itertools.count(os.getpid() * PER_PROCESS)


def free_port() -> int:
    """Return a port that the kernel gives to nobody, and that this process has not had before."""
    end = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32_768
    while True:
        port = LOWEST + next(_offsets) % (end - LOWEST)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
