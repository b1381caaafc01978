"""Check the server name of an import before anything is read.

The tasks that load the events open stores, which check it as well. That is after all lines were
read, which takes hours for a large archive.
"""

from storage.database.arrow_results import arrow_session
from storage.database.deployment import (
    NEEDS_NAME,
    NO_SERVER,
    SQL_DEPLOYMENT,
    SQL_IS_EMPTY,
    SQL_WHERE,
)
from storage.errors import InputError, WrongServerName


def check_name(dsn: str, server_name: str | None) -> None:
    """Raise `WrongServerName` for the database of another server.

    Raise `InputError` for a new one without a name.
    """
    with arrow_session(dsn) as conn:
        found = next((one["server_name"] for one in conn.rows(SQL_DEPLOYMENT)), None)
        if found is None and server_name is None:
            raise InputError(NEEDS_NAME)
        if found is None or server_name in {None, NO_SERVER, found}:
            return
        if not conn.rows(SQL_IS_EMPTY)[0]["is_empty"]:
            where = conn.rows(SQL_WHERE)[0]["place"]
            raise WrongServerName(str(server_name), found=found, where=where)
