"""Access: who looks, and what they may do.

A homeserver that mounts the inspector gives an `Access`: a function from the request to a `Viewer`,
or to None for nobody. `TokenAccess` is the one of `room-storage inspect`. Its token is printed in
a URL. The first request with it sets a cookie, and is redirected to an address without it, so that
the token is in no history entry and no Referer of a later page.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response

from storage.inspector.text import one_line


@dataclass(frozen=True, slots=True)
class Viewer:
    """A person who looks. ``name`` is for the log.

    ``content``: they may switch on the content of events. ``write``: they may use actions, if the
    inspector was made with ``read_write``.
    """

    name: str
    content: bool = True
    write: bool = False


Access = Callable[[HTTPConnection], Awaitable[Viewer | None]]
"""Return who makes a request, None to refuse it. Called for every request but static files."""

TOKEN_BYTES: Final = 32
PARAMETER: Final = "token"


class TokenAccess:
    """Access by one token, for the person who started the process.

    ``hosts`` are the values of the header Host that are answered: another name may lead a browser
    here for another site (DNS rebinding). Empty: any.
    """

    def __init__(self, viewer: Viewer, *, port: int, hosts: frozenset[str] = frozenset()) -> None:
        self.token: str = secrets.token_urlsafe(TOKEN_BYTES)
        self._viewer = viewer
        self._hosts = hosts
        # cookies are shared by all ports of a host
        self._cookie = f"room-storage-inspector-{port}"

    async def __call__(self, connection: HTTPConnection) -> Viewer | None:
        """Return the viewer if the cookie has the token, and the host is ours."""
        if not self.is_our_host(connection):
            return None
        return self._viewer if self._is_token(connection.cookies.get(self._cookie)) else None

    def is_our_host(self, connection: HTTPConnection) -> bool:
        """Return whether the header Host names this server."""
        return not self._hosts or connection.headers.get("host", "") in self._hosts

    def entered(self, connection: HTTPConnection) -> Response | None:
        """Return the answer to a request whose URL has the token; None for another one."""
        token = connection.query_params.get(PARAMETER)
        if token is None or not self._is_token(token) or not self.is_our_host(connection):
            return None
        left = connection.url.remove_query_params(PARAMETER)
        answer = RedirectResponse(f"{left.path}{'?' if left.query else ''}{left.query}", 303)
        answer.set_cookie(self._cookie, self.token, httponly=True, samesite="strict", path="/")
        return answer

    def _is_token(self, token: str | None) -> bool:
        return token is not None and secrets.compare_digest(token.encode(), self.token.encode())


def viewer_name(viewer: Viewer) -> str:
    """Return the name of a viewer for a line of the log."""
    return one_line(viewer.name)


# --------------------------------------------------------------------------------------------------
# The headers of every answer.
#
# The policy allows nothing by default. A script or a style sheet runs only if it is a file of this
# application, and the page names it with the nonce of the answer. No script is inline. So event
# content that became markup, by a defect, could still run nothing and load nothing.

NONCE_BYTES: Final = 16

FIXED: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

POLICY: Final = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self';"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types inspector"
)

NOTHING: Final = "default-src 'none'; frame-ancestors 'none'; sandbox"
"""The policy of answers that are no pages: raw bytes, JSON, streams."""


def new_nonce() -> str:
    return secrets.token_urlsafe(NONCE_BYTES)


def page_headers(nonce: str) -> dict[str, str]:
    return {**FIXED, "Content-Security-Policy": POLICY.format(nonce=nonce)}


def data_headers() -> dict[str, str]:
    """Return the headers of an answer that is no page."""
    return {**FIXED, "Content-Security-Policy": NOTHING}


def static_headers() -> dict[str, str]:
    """Return the headers of a script or a style sheet. Its URL has the version, so it may stay."""
    return {**data_headers(), "Cache-Control": "public, max-age=3600, immutable"}
