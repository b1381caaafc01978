"""Verdicts of the caller on events, such as those of a policy server.

`append` stores an event that the caller refuses as soft-failed, with the reason of the caller. The
verdict counts only for an event that the auth rules accept. `storage.persist.readmit` lifts it.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from storage import arguments as args
from storage.errors import InputError
from storage.ids import EventId

Refused = Mapping[EventId, str] | Mapping[str, str]
TIMELINE_ORIGINS: Final = ("live", "backfill")
REASON_MAX: Final = 500


def read_refused(refused: Refused | None, origin: str) -> dict[EventId, str]:
    """Return the reasons by event.

    Raise `InputError` for a malformed reason, or for an origin whose events have no verdict.
    """
    given = {} if refused is None else args.mapping(refused, "refused")
    if given and origin not in TIMELINE_ORIGINS:
        raise InputError(f"refused goes with live or backfilled events, not with {origin!r}")
    return {args.event(event_id): reason_of(one) for event_id, one in given.items()}


def reason_of(reason: object) -> str:
    """Return the reason of a verdict; raise `InputError` for what is none."""
    if not args.is_text(reason) or not 1 <= len(reason) <= REASON_MAX:
        raise InputError(
            f"the reason of a verdict is {reason!r}: "
            f"a text of 1 to {REASON_MAX} characters is wanted, without NUL and half surrogates"
        )
    return reason


def check_named(refused: Refused, event_ids: Iterable[EventId | None]) -> None:
    """Raise `InputError` if a refused event is not in the batch.

    ``event_ids`` are those of the batch, None for an unreadable PDU. It may have any id, so then
    nothing is raised: a bad PDU never fails its batch.
    """
    known = set(event_ids)
    if None not in known and (strange := refused.keys() - known):
        raise InputError(f"refused has {min(strange)}, which is not among the PDUs")
