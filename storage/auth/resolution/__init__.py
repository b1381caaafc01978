"""State resolution, pure: one state from several, by room version.

lookup       split states into unconflicted and conflicted keys
v1           room version 1
v2           room versions 2 to 11 (v2) and 12 (v2.1): the phases and the orders; auth chains, auth
             difference and conflicted state subgraph over an in-memory map
resolve      the entry points, and the events to load before `resolve_conflicts`
incremental  versions 2 and 2.1 incrementally, from an earlier result: this is what an append runs;
             the checks of `resolve_conflicts` in their order, with their results

An event whose auth check needs a missing event is skipped; it never stops a resolution.
"""

from storage.auth.resolution.incremental import (
    Change,
    EventSource,
    Replay,
    ReplayStep,
    Resolution,
    replay_conflicts,
)
from storage.auth.resolution.lookup import split_conflicts
from storage.auth.resolution.resolve import needed_events, resolve, resolve_conflicts
from storage.auth.resolution.v2 import auth_chain, auth_difference, conflicted_subgraph

__all__ = [
    "Change",
    "EventSource",
    "Replay",
    "ReplayStep",
    "Resolution",
    "auth_chain",
    "auth_difference",
    "conflicted_subgraph",
    "needed_events",
    "replay_conflicts",
    "resolve",
    "resolve_conflicts",
    "split_conflicts",
]
