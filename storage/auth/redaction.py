"""The condition under which a redaction applies to its target.

Source: room versions 1 and 2, authorization rule 11; room version 3, "Handling redactions".
"""

from collections.abc import Mapping

from storage.auth.level_lookup import PowerLevels
from storage.auth.state_keys import denied, domain_of
from storage.event import Event, RoomVersion
from storage.event.versions import version_of
from storage.ids import StateKey


def redaction_allowed(
    redaction: Event,
    target_sender: str,
    auth_state: Mapping[StateKey, Event],
    room_version: str | RoomVersion,
) -> bool:
    """Return whether an accepted redaction takes effect on a target sent by `target_sender`.

    `auth_state` is the state before the redaction: its power levels and create event. A redaction
    takes effect if the redactor has the redact level, or is on the server of the target's sender.
    In versions 1 and 2 the servers are those in the two event ids, and the same rule has already
    refused the redaction as an event.
    """
    version = version_of(room_version)
    levels = PowerLevels.of(auth_state, version)
    if levels.user(redaction.sender) >= levels.named("redact"):
        return True
    if version.redaction_by_auth_rule:
        return _same_origin(redaction)
    own = domain_of(redaction.sender)
    return own is not None and own == domain_of(target_sender)


def check_redaction(event: Event, levels: PowerLevels) -> None:
    """Raise AuthDenied where rule 11 of versions 1 and 2 refuses a redaction."""
    has, needs = levels.user(event.sender), levels.named("redact")
    if has < needs and not _same_origin(event):
        raise denied(
            event,
            "redaction.level",
            f"{event.sender} has level {has}, redacting {event.redacts!r} takes {needs}",
        )


def _same_origin(redaction: Event) -> bool:
    own = domain_of(redaction.event_id)
    return own is not None and redaction.redacts is not None and own == domain_of(redaction.redacts)
