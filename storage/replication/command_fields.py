"""The fields of replication commands: reading and checking single arguments."""

import json
import re
from functools import lru_cache
from typing import Any, Final

import orjson

from storage.errors import ProtocolError

LARGEST_TOKEN: Final = 2**63 - 1
LINE_BREAK: Final = re.compile(r"[\r\n]")
SHOWN_MAX: Final = 200
"""Characters of a wrong argument in an error."""

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,18}")
_SPACE: Final = re.compile(r"[ \r\n]")


def split(text: str, count: int) -> list[str]:
    """Split the arguments at spaces; the last one may contain spaces."""
    parts = text.split(" ", count - 1)
    if len(parts) != count:
        raise ProtocolError(f"{len(parts) if text else 0} of {count} arguments")
    return parts


def integer(text: str) -> int:
    """Read an integer in its only form."""
    if not _INTEGER.fullmatch(text) or abs(int(text)) > LARGEST_TOKEN:
        raise ProtocolError(f"not a number: {text[:SHOWN_MAX]!r}")
    return int(text)


@lru_cache(maxsize=4096)
def check_word(text: str, what: str) -> None:
    """Raise `ProtocolError` for a text that is empty or contains a space or line break."""
    if not text or _SPACE.search(text):
        raise ProtocolError(f"the {what} {text[:SHOWN_MAX]!r} is empty or holds a space")


def check_text(text: str, what: str) -> None:
    """Raise `ProtocolError` for a text that is blank or contains a line break."""
    if not text.strip():
        raise ProtocolError(f"the {what} is empty")
    check_one_line(text, what)


def check_one_line(text: str, what: str) -> None:
    """Raise `ProtocolError` for a text with a line break."""
    if LINE_BREAK.search(text):
        raise ProtocolError(f"the {what} holds a line break")


def load_json(text: str) -> Any:
    """Read JSON; raise `ProtocolError` for other text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"not JSON: {error}") from None


def dump_json(value: Any) -> str:
    """Return JSON without spaces, in ASCII."""
    try:
        text = orjson.dumps(value).decode()
        return (
            text
            if text.isascii() and "\x7f" not in text
            else json.dumps(value, separators=(",", ":"), allow_nan=False)
        )
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"not a JSON value: {error}") from None
