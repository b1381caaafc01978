"""Authorisation rules of room versions 1 to 12, and state resolution.

Pure: no I/O.
rules.py         `check`: one event against a state (create, membership, third_party, power_levels,
                 redaction: a topic each)
auth_events.py   `check_auth_events`: an event against the auth events it cites; the state keys that
                 an event's auth check needs
power_levels.py  which JSON values are power levels
resolution/     state resolution
"""

from storage.auth.auth_events import auth_event_keys, check_auth_events, keys_needed
from storage.auth.resolution import (
    Change,
    EventSource,
    Replay,
    ReplayStep,
    Resolution,
    auth_chain,
    auth_difference,
    conflicted_subgraph,
    needed_events,
    replay_conflicts,
    resolve,
    resolve_conflicts,
    split_conflicts,
)
from storage.auth.rules import CONTENT_MATTERS, check, redaction_allowed
from storage.errors import AuthDenied

__all__ = [
    "CONTENT_MATTERS",
    "AuthDenied",
    "Change",
    "EventSource",
    "Replay",
    "ReplayStep",
    "Resolution",
    "auth_chain",
    "auth_difference",
    "auth_event_keys",
    "check",
    "check_auth_events",
    "conflicted_subgraph",
    "keys_needed",
    "needed_events",
    "redaction_allowed",
    "replay_conflicts",
    "resolve",
    "resolve_conflicts",
    "split_conflicts",
]
