"""TLS for replication, with client certificates if wanted.

Rows name rooms and users: use it on any network but loopback.
"""

import re
import ssl
from pathlib import Path
from typing import Final

from storage.errors import InputError

OF_OPENSSL: Final = re.compile(r"^\[.*?\] | \(_ssl\.c:\d+\)$")
"""The parts of an error that name the library and its line of source."""


def server_context(
    certificate: Path, key: Path, *, client_authorities: Path | None = None
) -> ssl.SSLContext:
    """Build the context of a server, from PEM files.

    With ``client_authorities`` only clients with a certificate signed by them may connect.

    Raise `InputError` for files that cannot be read or do not match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, certificate, key, client_authorities)
    if client_authorities is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    authorities: Path | None = None, *, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Build the context of a client, from PEM files.

    ``authorities`` may sign the server's certificate (None: the system's list); ``certificate`` and
    ``key`` are the client's own. Raise `InputError` for files that cannot be read or do not match.
    """
    context = ssl.create_default_context()
    _load(context, certificate, key, authorities)
    return context


def _load(
    context: ssl.SSLContext, certificate: Path | None, key: Path | None, authorities: Path | None
) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if certificate is not None:
            context.load_cert_chain(certificate, key)
        if authorities is not None:
            context.load_verify_locations(authorities)
    except OSError as error:  # TLS errors are subclasses
        given = [path for path in (certificate, key, authorities) if path is not None]
        for path in given:
            _check_readable(path)
        names = ", ".join(map(str, given))
        reason = OF_OPENSSL.sub("", str(error)).lower()
        raise InputError(
            f"TLS with {names}: {reason}: each file must be PEM, "
            "and the key that of the certificate"
        ) from None


def _check_readable(path: Path) -> None:
    """Raise `InputError` with the name of a file that cannot be read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"the file {path} for TLS cannot be read: {error.strerror}") from None
