"""Describe in a few words which database a command works on, without a password."""

from urllib.parse import parse_qs, urlsplit

from storage.database.embedded import data_directory


def described(dsn: str | None, schema: str) -> str:
    """Return the folder of the embedded Postgres, or host, port, database and schema of a DSN."""
    if dsn is None:
        return f"{data_directory().absolute()} (embedded Postgres)"
    parts = urlsplit(dsn)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    host = options.get("host") or parts.netloc.rpartition("@")[2] or "the local socket"
    if "port" in options and not host.endswith(f":{options['port']}"):
        host += f":{options['port']}"
    name = options.get("dbname") or parts.path.lstrip("/") or "that of the user"
    return f"{name} at {host}, schema {schema}"
