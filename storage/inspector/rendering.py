"""Templates, in which every value is text.

Each value passes `visible` and is then escaped. No template marks a value as markup; a test looks
for that. A template gets the links from `Links`, which encodes every id.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from storage.inspector import text
from storage.inspector.access import Viewer, viewer_name
from storage.inspector.text import one_line, visible

STATIC: Final = files("storage.inspector") / "static"
TYPES: Final[Mapping[str, str]] = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Links:
    """The addresses of an application that may be mounted below a path, ``root``."""

    def __init__(self, root: str) -> None:
        self._root = quote(root.rstrip("/"), safe="/")

    def __call__(self, path: str, **parameters: object) -> str:
        """Return the address of a page; a parameter of None is left out."""
        return self.to(path, parameters)

    def to(self, path: str, parameters: Mapping[str, object]) -> str:
        """Return the address of a page, with parameters of any name."""
        present = {name: value for name, value in parameters.items() if value is not None}
        query = urlencode(present, quote_via=quote, safe="")
        return f"{self._root}{quote(path)}{'?' if query else ''}{query}"

    def static(self, name: str) -> str:
        """Return the address of a script or a style sheet, which changes with its content."""
        return f"{self._root}/static/{static_version()}/{name}"


@cache
def static_file(name: str) -> tuple[bytes, str] | None:
    """Return a script or style sheet and its type; None if there is no such file."""
    files = {path.name: path for path in STATIC.iterdir() if path.is_file()}
    kind = TYPES.get(name.rpartition(".")[2])
    if name not in files or kind is None:
        return None
    return files[name].read_bytes(), kind


@cache
def static_version() -> str:
    """Return a digest of all scripts and style sheets."""
    digest = hashlib.sha256()
    for file in sorted(STATIC.iterdir(), key=lambda path: path.name):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def shown(value: object) -> object:
    """Return a value as a template shows it: text without hidden characters."""
    if isinstance(value, Markup) or value is None or isinstance(value, bool | int | float):
        return "" if value is None else value
    return visible(value if isinstance(value, str) else str(value))


def pretty(value: Any) -> str:
    """Return JSON for people: indented, keys in order, no escapes but those of JSON."""
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)


def compact(value: Any) -> str:
    """Return JSON in one line."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def state_key_name(key: tuple[str, str]) -> str:
    """Return a state key in one line: the type, and the state key if it is not empty."""
    return f"{key[0]} {key[1]}" if key[1] else key[0]


@cache
def environment() -> Environment:
    """Return the templates of the inspector."""
    made = Environment(
        loader=PackageLoader("storage.inspector"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "compact": compact,
        "ago": lambda ms: text.ago(ms, time.time_ns() // 1_000_000),
        "counted": text.counted,
        "day": text.day,
        "duration": text.duration,
        "key": state_key_name,
        "level": text.level,
        "moment": text.moment,
        "number": text.number,
        "percent": text.percent,
        "pretty": pretty,
        "sentence": text.sentence,
        "short": text.shortened,
        "size": text.size,
    }
    return made


# --------------------------------------------------------------------------------------------------
# The log of who looked at what, on the logger `storage.inspector.rendering`.
#
# Each page is one record of the level INFO, with the viewer, the path, and the ids in its
# parameters. A page that shows content is a second record that says so. Both are written before the
# answer is made, so that a look that fails is in the log, too.

logger: logging.Logger = logging.getLogger(__name__)

VALUE_MAX = 300  # characters of a parameter in the log


def log_page(viewer: Viewer, path: str, parameters: Mapping[str, str]) -> None:
    logger.info(
        "%s looks at %s",
        viewer_name(viewer),
        one_line(path),
        extra={"viewer": viewer_name(viewer), "parameters": _shown(parameters)},
    )


def log_content(viewer: Viewer, path: str, parameters: Mapping[str, str]) -> None:
    """Log that a viewer has switched on the content of the events of a page."""
    logger.info(
        "%s reads the content of events at %s",
        viewer_name(viewer),
        one_line(path),
        extra={"viewer": viewer_name(viewer), "parameters": _shown(parameters), "content": True},
    )


def log_action(viewer: Viewer, action: str, parameters: Mapping[str, str]) -> None:
    """Log that a viewer changes something."""
    logger.warning(
        "%s runs the action %s: %s",
        viewer_name(viewer),
        action,
        _shown(parameters),
        extra={"viewer": viewer_name(viewer)},
    )


def log_refusal(path: str, client: str) -> None:
    """Log that a request was refused."""
    logger.info("a request of %s to %s is refused", one_line(client), one_line(path))


def _shown(parameters: Mapping[str, str]) -> str:
    """Return parameters in one line; a hostile id cannot begin a line of its own."""
    return " ".join(f"{one_line(k)}={one_line(v[:VALUE_MAX])}" for k, v in parameters.items())
