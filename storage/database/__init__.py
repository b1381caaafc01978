"""Postgres: connections, errors, the embedded server and migrations.

No driver exception leaves this package.
"""

from storage.database.connection import Connection, Database, Observer
from storage.database.pool import Isolation

__all__ = ["Connection", "Database", "Isolation", "Observer"]
