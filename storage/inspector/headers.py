"""The headers of every answer.

The policy allows nothing by default. A script or a style sheet runs only if it is a file of this
application, and the page names it with the nonce of the answer. No script is inline. So event
content that became markup, by a defect, could still run nothing and load nothing.
"""

import secrets
from collections.abc import Mapping
from typing import Final

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
