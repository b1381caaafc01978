"""The pages of actions: the list, a confirmation, and the request that runs one.

A form carries a signature of the viewer, the action and its fields, which only the confirmation
page gets. So a form of another site cannot run an action, and no one action can be turned into
another. Where the browser says that a request comes from another site, it is refused as well.
"""

import hashlib
import hmac
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from starlette.responses import RedirectResponse, Response

from storage.errors import InputError
from storage.inspector import looks
from storage.inspector.actions.catalogue import ACTIONS, Action, Fields
from storage.inspector.headers import data_headers
from storage.inspector.visit import Page, Visit

if TYPE_CHECKING:
    from storage.inspector.application import Inspector

BODY_MAX: Final = 16_384
SIGNATURE: Final = "signature"


class ActionRefusedError(InputError):
    """The request does not come from a confirmation page of this viewer."""


def signature_of(inspector: "Inspector", viewer: str, name: str, fields: Fields) -> str:
    said = "\0".join([viewer, name, *(f"{key}={fields[key]}" for key in sorted(fields))])
    return hmac.new(inspector.secret, said.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def _check_viewer(visit: Visit) -> None:
    if not visit.viewer.write:
        raise ActionRefusedError("you may look, and not change anything")


def _action(name: str | None) -> Action:
    action = ACTIONS.get(name or "")
    if action is None:
        raise InputError(f"no action is named {name!r}: {', '.join(ACTIONS)}")
    return action


async def listed(visit: Visit) -> Response:
    """Show the actions, and the tasks that they have started."""
    _check_viewer(visit)
    return visit.render(
        "actions.html",
        actions=ACTIONS,
        tasks=visit.inspector.tasks.known,
        result=visit.text("result"),
    )


async def confirm(visit: Visit) -> Response:
    """Ask once more, with the effect in a sentence."""
    _check_viewer(visit)
    name = visit.wanted("action")
    action = _action(name)
    fields = {field: visit.wanted(field) for field in action.fields}
    signature = signature_of(visit.inspector, visit.viewer.name, name, fields)
    return visit.render(
        "confirm.html", name=name, action=action, fields=fields, signature=signature
    )


async def run(visit: Visit) -> Response:
    """Run an action, and return to the list."""
    _check_viewer(visit)
    given = await _body(visit)
    name = given.pop("action", "")
    action, signature = _action(name), given.pop(SIGNATURE, "")
    fields = {field: given.get(field, "") for field in action.fields}
    expected = signature_of(visit.inspector, visit.viewer.name, name, fields)
    if _is_foreign(visit) or not hmac.compare_digest(signature.encode(), expected.encode()):
        raise ActionRefusedError("the form is not from this page: open the action again")
    looks.log_action(visit.viewer, name, fields)
    result = await action.run(visit.inspector, fields)
    return RedirectResponse(visit.links("/actions", result=result), 303, data_headers())


def _is_foreign(visit: Visit) -> bool:
    """Return whether the browser says that another site made the request."""
    headers = visit.request.headers
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_other_origin = origin is not None and origin.partition("://")[2] != headers.get("host")
    return site not in {None, "same-origin"} or is_other_origin


async def _body(visit: Visit) -> dict[str, str]:
    """Return the fields of a form. `InputError` for a large one."""
    body = bytearray()
    async for part in visit.request.stream():
        body += part
        if len(body) > BODY_MAX:
            raise InputError(f"the form has more than {BODY_MAX} bytes")
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


ACTION_ROUTES: Final[Mapping[str, Page]] = {"/actions": listed, "/actions/confirm": confirm}
POST_ROUTES: Final[Mapping[str, Page]] = {"/actions/run": run}
