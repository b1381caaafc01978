"""The bounds on what one message of another server can make this server do."""

from dataclasses import dataclass, fields
from typing import Any

from storage import arguments as args


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverLimits:
    """The limits of a `Receiver`. Work that reaches one stops, and its outcome says so.

    A *task* is the gap of one room in one transaction, a join, or a backfill.
    """

    pdus_max: int = 50
    """PDUs of one transaction. More are an `InputError`; the specification allows no more."""

    rooms_at_once: int = 4
    """Rooms of one transaction that are worked on at the same time."""

    request_seconds: float = 10.0
    """Time for one request to another server."""

    task_seconds: float = 60.0
    """Time for the requests of one task, with the wait for another task in the same room."""

    requests_max: int = 100
    """Requests to other servers in one task, without those for keys."""

    requests_at_once: int = 5
    """Single events that one task requests at the same time."""

    send_membership_seconds: float = 60.0
    """Time for one send_join, send_knock, send_leave or invite. A server resolves a state first."""

    resident_servers_max: int = 5
    """Servers that are tried for one join, knock or leave."""

    servers_max: int = 3
    """Servers that are tried for the same answer."""

    missing_rounds_max: int = 5
    """Requests of `get_missing_events` that follow each other backwards in one gap."""

    missing_events_max: int = 20
    """Events of one answer to `get_missing_events`."""

    backfill_max: int = 100
    """Events of one answer to `backfill`."""

    left_gap_seconds: float = 604_800.0
    """Gaps that were left open for longer are filled by `Receiver.backfill` alone."""

    states_max: int = 5
    """Events of one task for which the state before them is requested."""

    state_events_max: int = 100_000
    """Events of one state, and of its auth chain. A larger state is refused."""

    single_events_max: int = 20
    """Events of a state that are requested one by one. If more are missing, all are requested."""

    event_auth_max: int = 5
    """Events of one task for which the auth chain is requested."""

    keys_seconds: float = 20.0
    """Time for the keys of all servers that signed the events of one answer."""

    key_servers_at_once: int = 20
    """Servers whose keys are requested at the same time."""

    key_servers_cached: int = 10_000
    """Servers whose keys are kept in memory."""

    key_retry_seconds: float = 60.0
    """Pause until a server is asked again for a key that it did not have, or could not return."""

    completing_seconds: float = 30.0
    """Pause until rooms of which members are missing are looked for again."""

    def __post_init__(self) -> None:
        check_limits(self)


def check_limits(limits: Any) -> None:
    """Raise `InputError` unless each field of a dataclass is a positive number of its type."""
    for field in fields(limits):
        args.positive(getattr(limits, field.name), field.name, whole=field.type is int)
