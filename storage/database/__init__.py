"""Postgres: connections, errors, the embedded server and migrations.

No driver exception passes this package.
"""

from storage.database.connection import Connection, Database, Isolation, Observer

__all__ = ["Connection", "Database", "Isolation", "Observer"]
