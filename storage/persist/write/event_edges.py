"""The columns of `events` for its parents and auth events: how these are written.

One parent, and up to four auth events, are stored as distances from the nid of the event; more as
an array of nids. In the schema prev_nids and auth_nids read both forms. An event with no parent, as
an outlier, has neither form.

    event 900 with prev_events [899]          prev_distance 1
    event 900 with prev_events [899, 870]     prev_events {899,870}
    event 900 with auth_events [1, 2, 880]    auth_distance_1 899, auth_distance_2 898, …_3 20
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

FARTHEST: Final = 2**31 - 1
NO_DISTANCES: Final = (None, None, None, None)
PADDING: Final = tuple(NO_DISTANCES[length:] for length in range(5))
AUTH_DISTANCES: Final = (
    "auth_distance_1",
    "auth_distance_2",
    "auth_distance_3",
    "auth_distance_4",
)

Nids = Sequence[int]


def edge_columns(
    nids: Nids, prev_events: Sequence[Nids], auth_events: Sequence[Nids]
) -> dict[str, Sequence[object]]:
    """Return the columns of the edges of events; a column without values is empty."""
    columns: dict[str, Sequence[object]] = dict.fromkeys(("prev_distance", *AUTH_DISTANCES), ())
    auth = [_auth_distances(*one) for one in zip(nids, auth_events, strict=True)]
    columns |= zip(AUTH_DISTANCES, map(sparse, zip(*auth, strict=True)), strict=True)
    distances = [_prev_distance(*one) for one in zip(nids, prev_events, strict=True)]
    return {
        **columns,
        "prev_distance": distances,
        "prev_events": _left(prev_events, distances),
        "auth_events": _left(auth_events, (one[0] for one in auth)),
    }


def _prev_distance(nid: int, parents: Nids) -> int | None:
    if len(parents) == 1 and -FARTHEST <= (distance := nid - parents[0]) <= FARTHEST:
        return distance
    return None


def _auth_distances(nid: int, auth: Nids) -> tuple[int | None, ...]:
    """Return the distances of up to four events; None for all of them if one is too far."""
    if len(auth) <= len(AUTH_DISTANCES):
        distances = tuple([nid - one for one in auth])
        if not auth or (max(distances) <= FARTHEST and min(distances) >= -FARTHEST):
            return distances + PADDING[len(auth)]
    return NO_DISTANCES


def _left(edges: Sequence[Nids], distances: Iterable[int | None]) -> Sequence[Nids | None]:
    return sparse(
        [
            nids if distance is None and nids else None
            for nids, distance in zip(edges, distances, strict=True)
        ]
    )


def sparse(column: Sequence[Any]) -> Sequence[Any]:
    """Return an empty column for one without values: unnest fills it up with NULLs."""
    return () if column.count(None) == len(column) else column
