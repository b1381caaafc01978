"""DSNs: from the environment or a file, and the places and files that one names.

Errors of a connection name the host, the port and the file, and never a password. So a DSN is read
here before the driver reads it, and an error shows none of its text but names.
"""

import os
import re
import socket
import ssl
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from storage.errors import InputError

VARIABLE: Final = "STORAGE_DSN"
SYNAPSE_VARIABLE: Final = "STORAGE_SYNAPSE_DSN"
PORT: Final = 5432
HIDDEN: Final = "***"
ESCAPES: Final = (
    "in a user name or a password write / as %2F, ? as %3F, # as %23, @ as %40, % as %25"
)

IN_PROCESS_LIST: Final = (
    "the process list shows the password of %s to other users of this machine: "
    "use %s, %s_FILE or PGPASSFILE"
)
"""A warning; the names of what contains the password, and twice of the variable to use."""

ESCAPE: Final = re.compile("%(?![0-9A-Fa-f]{2})")
"""A percent sign that begins no escape. libpq refuses it, and the driver reads it as itself."""

TLS_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
"""Options of a DSN that name a file. Each has a variable, as PGSSLROOTCERT."""


def environment_dsn(
    environ: Mapping[str, str] = os.environ, variable: str = VARIABLE
) -> str | None:
    """Return the DSN of a variable, or of the file that ``<variable>_FILE`` names; else None.

    Raise `InputError` if both are set, if one is empty, or if the file cannot be read. An empty one
    would otherwise choose the embedded Postgres, which nobody means.
    """
    dsn, path = environ.get(variable), environ.get(f"{variable}_FILE")
    for name, value in ((variable, dsn), (f"{variable}_FILE", path)):
        if value is not None and not value.strip():
            raise InputError(f"{name} is empty: unset it, or set it to a database")
    if dsn and path:
        raise InputError(f"{variable} and {variable}_FILE are both set: unset one")
    return _from_file(f"{variable}_FILE", path) if path else dsn


def _from_file(variable: str, path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(f"{variable}: {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{variable}: {path} is not UTF-8") from None
    if not text or "\n" in text:
        raise InputError(f"{variable}: {path} must have one line, with the DSN")
    return text


class DsnServer:
    """The server that a DSN names: for the driver its DSN, for a reader its place."""

    __slots__ = ("_files", "_options", "_secrets", "address", "dsn", "hosts")

    def __init__(self, dsn: str) -> None:
        """Raise `InputError` if the DSN cannot be read."""
        parts = _split(dsn)
        options = _options(parts)
        self.dsn: str = dsn
        self.hosts: list[tuple[str, int]] = list(_hosts(parts, options))
        self.address: str = ", ".join(_shown(host, port) for host, port in self.hosts)
        self._files = {
            name: path
            for name in TLS_FILES
            if (path := options.get(name) or os.environ.get(f"PG{name.upper()}"))
        }
        raw = parts.netloc.rpartition("@")[0].partition(":")[2]
        self._secrets = {raw, unquote(raw), options.get("password", "")} - {""}
        self._options = {name: value for name, value in options.items() if name == "passfile"}

    def __repr__(self) -> str:
        return f"DsnServer({self.address!r})"

    def hide(self, text: str) -> str:
        """Return a text without the password."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text

    def password_source(self) -> str:
        """Return where the driver takes the password from, for an error of a wrong one."""
        if self._secrets:
            return "the DSN has the password"
        if os.environ.get("PGPASSWORD"):
            return "PGPASSWORD has the password"
        named = self._options.get("passfile") or os.environ.get("PGPASSFILE")
        path = Path(named or os.path.expanduser("~/.pgpass"))  # noqa: PTH111  # never raises
        return f"no password in the DSN or in PGPASSWORD; {_password_file(path)}"

    def reason(self, error: BaseException) -> str:
        """Return why a connection could not be opened, in words that name the host or the file."""
        if file_reason := self._of_files(error):
            return file_reason
        if isinstance(error, socket.gaierror):
            return f"the host name is not known ({error.strerror})"
        if isinstance(error, FileNotFoundError):
            return "there is no such socket: no server runs there, or its folder is another one"
        if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
            return os.strerror(error.errno).lower()
        if isinstance(error, TimeoutError):
            return "no answer within the time limit"
        return self.hide(str(error)) or type(error).__name__

    def _of_files(self, error: BaseException) -> str | None:
        """Return the reason for an error of TLS or of a file, with the path; None for others."""
        if isinstance(error, ssl.SSLCertVerificationError):
            trusted = self._files.get("sslrootcert", "the file of sslrootcert")
            return f"{trusted} does not prove the server's certificate: {error.verify_message}"
        if isinstance(error, FileNotFoundError | PermissionError):
            return self._unreadable()
        if isinstance(error, ssl.SSLError) and self._files:
            named = ", ".join(f"{name} {path}" for name, path in self._files.items())
            return f"TLS with {named}: {(error.reason or str(error)).lower()}"
        return None

    def _unreadable(self) -> str | None:
        """Return which file of TLS cannot be read, and why."""
        for name, path in self._files.items():
            try:
                Path(path).open("rb").close()
            except OSError as error:
                return f"the file {path} of {name} cannot be read: {error.strerror}"
        return None


def _password_file(path: Path) -> str:
    """Return what a password file contributed. The driver skips one that it cannot use."""
    try:
        mode = path.stat().st_mode
        path.open("rb").close()
    except OSError as error:
        return f"the password file {path} cannot be read: {error.strerror}"
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"the password file {path} is ignored, because others can read it: chmod 600"
    return (
        f"the first line of the password file {path} that fits host, port, database and user counts"
    )


def has_password(dsn: str) -> bool:
    """Return whether a DSN contains a password; also where it cannot be read."""
    return bool(":" in dsn.partition("//")[2].rpartition("@")[0] or "password=" in dsn)


def _split(dsn: Any) -> SplitResult:
    """Split a DSN; the errors show nothing of it."""
    if not isinstance(dsn, str):
        raise InputError(f"the DSN is of the type {type(dsn).__name__}: a text is wanted")
    try:
        parts = urlsplit(dsn)
    except ValueError:
        raise InputError(
            "the DSN cannot be read: a bracket of an IPv6 address is missing"
        ) from None
    if parts.scheme not in {"postgresql", "postgres"} or not dsn.partition(":")[2].startswith("//"):
        raise InputError("the DSN cannot be read: it must begin with postgresql://")
    is_cut = ":" in parts.netloc and "@" not in parts.netloc and "@" in parts.query
    if parts.fragment or "@" in parts.path or parts.netloc.count("@") > 1 or is_cut:
        raise InputError(f"the DSN cannot be read: {ESCAPES}")
    if ESCAPE.search(dsn.partition("?")[0]):
        raise InputError(f"the DSN cannot be read: a % begins no code of two digits; {ESCAPES}")
    return parts


def _options(parts: SplitResult) -> dict[str, str]:
    try:
        return dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise InputError(
            "the DSN cannot be read: its options must be name=value, with & between them"
        ) from None


def _hosts(parts: SplitResult, options: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the hosts with their ports, as libpq chooses them."""
    named = [_host_and_port(part) for part in parts.netloc.rpartition("@")[2].split(",")]
    hosts = [host for host, _ in named if host] or _listed(options, "host", "PGHOST")
    ports = [port for _, port in named if port] or _listed(options, "port", "PGPORT")
    for at, host in enumerate(hosts or [""]):
        yield unquote(host), _number(ports[at] if at < len(ports) else (ports or [str(PORT)])[0])


def _host_and_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, port.removeprefix(":")
    host, _, port = text.partition(":")
    return host, port


def _listed(options: Mapping[str, str], name: str, variable: str) -> list[str]:
    listed = options.get(name) or os.environ.get(variable)
    return listed.split(",") if listed else []


def _number(port: str) -> int:
    """Return a port; a text that is none may be a part of a password, and is not shown."""
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise InputError(
            f"the DSN cannot be read: its port must be a number from 1 to 65535; {ESCAPES}"
        )
    return int(port)


def _shown(host: str, port: int) -> str:
    if not host:
        return f"localhost or a local socket, port {port}"
    if host.startswith("/"):
        return f"{host}/.s.PGSQL.{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
