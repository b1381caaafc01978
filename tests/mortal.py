"""A Postgres of a test's own, to be stopped, killed and started again."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from storage import Config
from storage.database.embedded import EmbeddedPostgres
from tests.postgres import chosen_binaries

SERVER_CONFIG: Final = Config(embedded_shared_buffers_mb=16, embedded_connections_max=60)


class Mortal:
    """A Postgres of the test's own."""

    def __init__(self, folder: Path) -> None:
        self._server = EmbeddedPostgres(folder, config=SERVER_CONFIG, binaries=chosen_binaries())

    def start(self) -> str:
        return self._server.start()

    def kill(self) -> None:
        """All of it at once, as when the machine goes."""
        pid = self._server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        self._server.stop()


@contextmanager
def mortal_postgres() -> Iterator[Mortal]:
    """A server that is not started yet; it is stopped at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="mortal-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        server = Mortal(folder)
        try:
            yield server
        finally:
            server.stop()
