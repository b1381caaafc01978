"""The log of who looked at what, on the logger `storage.inspector.looks`.

Each page is one record of the level INFO, with the viewer, the path, and the ids in its parameters.
A page that shows content is a second record that says so. Both are written before the answer is
made, so that a look that fails is in the log, too.
"""

import logging
from collections.abc import Mapping

from storage.inspector.access import Viewer, viewer_name
from storage.inspector.text import one_line

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
