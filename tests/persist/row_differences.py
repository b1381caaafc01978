"""The differences of two stores whose rows were read (tests/persist/whole_rows.py).

Two stores that joined by the same answer are equal, row for row. If the second one had joined with
the members omitted and was completed, a few positions are its own.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tests.persist.whole_rows import COMPLETED, TABLES, Row, StoreRows


def differences(full: StoreRows, completed: StoreRows, moved: Iterable[str] = ()) -> list[str]:
    """Return the differences of two stores, as lines; the second one may have been completed."""
    lines, kept = [*full.disagreements, *completed.disagreements], set(moved)
    folded = completed.before_completion
    for table in TABLES:
        tables = full.tables[table], completed.tables[table]
        lines += _table_differences(table, *tables, kept, folded)
    theirs = [one for one in full.order if one not in kept]
    ours = [one for one in completed.order if one not in kept]
    if theirs != ours or set(full.order) != set(completed.order):
        lines.append(f"order: {theirs} != {ours}")
    return lines + _delta_differences(full, completed)


def _table_differences(
    table: str,
    full: Mapping[tuple[Any, ...], Row],
    completed: Mapping[tuple[Any, ...], Row],
    moved: set[str],
    folded: set[str],
) -> list[str]:
    lines = [
        f"{table}: only one has {key}" for key in sorted(full.keys() ^ completed.keys(), key=str)
    ]
    for key in full.keys() & completed.keys():
        for column, value in full[key].items():
            other = completed[key][column]
            may_differ = _may_differ(table, column, completed[key], value, moved) or (
                table == "memberships" and _is_folded(column, value, other, folded)
            )
            if value != other and not may_differ:
                lines.append(f"{table} {key} {column}: {_unlike(value, other)}")
    return lines


def _is_folded(column: str, full: Any, completed: Any, folded: set[str]) -> bool:
    """Return whether a position is that of a delta that is compared by what it leads to.

    The whole state may let a user out for a while and in again where the partial one does not, or
    the other way. Then clients of the stores got other changes, with other positions.
    """
    return column == "stream_ordering" and {full, completed} <= folded


def _may_differ(table: str, column: str, row: Row, full: Any, moved: set[str]) -> bool:
    """Return whether a value depends on a position that a completion has given.

    ``full``: the value of the other store. A membership that it has from a moved event came with
    another event before the completion.
    """
    if column == "after_gap":
        return not moved.isdisjoint([row["event_id"], *row["prev_events"]])
    given = {COMPLETED, *moved}
    return TABLES[table].get(column) == "position" and not given.isdisjoint([row[column], full])


def _unlike(value: Any, other: Any) -> str:
    if isinstance(value, dict) and isinstance(other, dict):
        keys = {key for key in value.keys() | other.keys() if value.get(key) != other.get(key)}
        return str({key: (value.get(key), other.get(key)) for key in keys})
    if isinstance(value, set) and isinstance(other, set):
        return f"only full {value - other}, only completed {other - value}"
    return f"{value!r} != {other!r}"


def _delta_differences(full: StoreRows, completed: StoreRows) -> list[str]:
    """Compare the state deltas after the completion, and the state up to there."""
    before = completed.before_completion
    ours = [one for one in completed.deltas if one[0] not in before]
    theirs = [one for one in full.deltas if one[0] not in before]
    lines = [f"state_deltas: only full {one}" for one in theirs if one not in ours]
    lines += [f"state_deltas: only completed {one}" for one in ours if one not in theirs]
    state = _folded(one for one in full.deltas if one[0] in before)
    other = _folded(one for one in completed.deltas if one[0] in before)
    if state != other:
        lines.append(f"state_deltas up to the completion: {_unlike(state, other)}")
    return lines


def _folded(deltas: Iterable[tuple[str, dict[Any, str | None]]]) -> dict[Any, str]:
    state: dict[Any, str] = {}
    for _, changes in deltas:
        for key, event in changes.items():
            if event is None:
                state.pop(key, None)
            else:
                state[key] = event
    return state
