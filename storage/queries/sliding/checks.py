"""Checks of the fields of a request: each raises `InputError` with what is wanted."""

from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol, TypeVar

from storage import arguments as args
from storage.errors import InputError
from storage.ids import StateKey

LISTS_MAX: Final = 100
RANGES_MAX: Final = 100
SUBSCRIPTIONS_MAX: Final = 100
REQUIRED_MAX: Final = 1_000
NAME_BYTES_MAX: Final = 255
LAZY: Final = "$LAZY"

T = TypeVar("T")


class RoomConfig(Protocol):
    """The common fields of a list and a subscription: the parts of a room that the client wants."""

    @property
    def timeline_limit(self) -> int:
        """Return the largest number of events in the timeline."""
        ...

    @property
    def required_state(self) -> Collection[StateKey]:
        """Return the wanted pairs of a type and a state key."""
        ...

    @property
    def excluded_state(self) -> Collection[StateKey]:
        """Return the pairs whose state is left out."""
        ...


def set_room_config(config: RoomConfig) -> None:
    """Check the fields that say what a room in the response has."""
    limit = args.limit(config.timeline_limit, args.LARGEST, "timeline_limit")
    object.__setattr__(config, "timeline_limit", limit)
    required = _pairs(config.required_state, "required_state")
    object.__setattr__(config, "required_state", required)
    excluded = _pairs(config.excluded_state, "excluded_state")
    if any(key == LAZY for _, key in excluded):
        raise InputError('excluded_state has "$LAZY": it is for required_state')
    object.__setattr__(config, "excluded_state", excluded)


def _pairs(values: Collection[StateKey], name: str) -> frozenset[StateKey]:
    pairs = args.keys(args.listed(values, name)) or []
    if len(pairs) > REQUIRED_MAX:
        raise InputError(f"{name} has {len(pairs)} entries, more than {REQUIRED_MAX}")
    for kind, key in pairs:
        if max(len(kind.encode()), len(key.encode())) > NAME_BYTES_MAX:
            limit = f"at most {NAME_BYTES_MAX} bytes"
            raise InputError(f"{name} has ({kind[:99]!r}, {key[:99]!r}): {limit} each")
        if key == LAZY and kind != "m.room.member":
            raise InputError(f'{name} has ({kind!r}, "$LAZY"): it is for m.room.member')
    return frozenset(pairs)


def index_ranges(ranges: object) -> tuple[tuple[int, int], ...] | None:
    """Return the ranges. Raise `InputError` for one that is no pair of indexes in order."""
    if ranges is None:
        return None
    pairs = args.listed(ranges, "ranges")  # type: ignore[arg-type,var-annotated]  # it checks
    if len(pairs) > RANGES_MAX:
        raise InputError(f"ranges has {len(pairs)} pairs, more than {RANGES_MAX}")
    return tuple(_index_range(pair) for pair in pairs)


def _index_range(pair: object) -> tuple[int, int]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError(f"ranges has {pair!r}: pairs of indexes are wanted, write [(0, 19)]")
    first, last = (args.limit(index, args.LARGEST, "an index of ranges") for index in pair)
    if first > last:
        raise InputError(f"ranges has {pair!r}: the first index must not be above the last")
    return first, last


def room_types(types: Collection[str | None] | None, name: str) -> frozenset[str | None] | None:
    """Return the room types. Raise `InputError` for what is neither a text nor None."""
    if types is None:
        return None
    for room_type in (listed := args.listed(types, name)):
        if room_type is not None and not isinstance(room_type, str):
            raise InputError(f"{name} has {room_type!r}: texts or None are wanted")
    return frozenset(listed)


def distinct(names: Collection[T] | None) -> frozenset[T] | None:
    return None if names is None else frozenset(names)


def entries(values: Mapping[Any, T], kind: type[T], name: str, most: int) -> dict[Any, T]:
    """Return the entries of a mapping. Raise `InputError` for too many, or for another type."""
    entries = dict(args.mapping(values, name))
    if len(entries) > most:
        raise InputError(f"{name} has {len(entries)} entries, more than {most}")
    for value in entries.values():
        args.instance(value, kind, f"a value of {name}")
    return entries


def check_list_name(name: str) -> None:
    """Raise `InputError` for an empty name, and for a long one."""
    if not 1 <= len(args.text(name).encode()) <= NAME_BYTES_MAX:
        raise InputError(f"the name of a list has 1 to {NAME_BYTES_MAX} bytes, not {name[:99]!r}")


def allowed_names(
    names: Collection[str], allowed: Collection[str], field_name: str
) -> frozenset[str]:
    """Return the names. Raise `InputError` for an unknown one."""
    for name in (listed := args.listed(names, field_name)):
        if not args.is_text(name) or name not in allowed:
            expected = ", ".join(sorted(allowed)) or "none"
            raise InputError(f"{field_name} has {name!r}: known here: {expected}"[:500])
    return frozenset(listed)
