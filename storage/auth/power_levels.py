"""The rule on `m.room.power_levels`: its form, and the changes that a sender may make.

A property or entry that is absent has no value of its own. Adding one is checked against the new
value, removing one against the old value, as the specification reads and Synapse does. Other
servers use the default in its place. Up to version 9 the specification requires well-formed `users`
only. A malformed other level is refused here as well, because those versions define the format of a
level.

Source: room versions 1 to 12, authorization rules, rule "If type is m.room.power_levels".
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from storage.auth.state_keys import CREATE, POWER_LEVELS, denied, is_user_id
from storage.event import Event, RoomVersion
from storage.ids import StateKey

# --------------------------------------------------------------------------------------------------
# Power levels: the number formats of a room version, and the level of a user, type or action.
#
# `PowerLevels` reads an `m.room.power_levels` content lazily, one level at a time. So checking a
# message in a room with 20,000 entries in `users` costs a few dictionary look-ups and needs no
# cache. A value that is not a level of the room version counts as absent here.
# `storage.auth.power_levels` refuses events that carry one.
#
# Source: client-server API, m.room.power_levels; room versions 1 (strings), 2 (floats), 10
# (integers), 12 (creators).

Level = int | float
"""An integer, or `CREATOR_LEVEL`."""

CREATOR_LEVEL: Final = math.inf
"""Room version 12: the creators of a room are above every number."""

DEFAULTS: Final[Mapping[str, int]] = {
    "users_default": 0,
    "events_default": 0,
    "state_default": 50,
    "ban": 50,
    "redact": 50,
    "kick": 50,
    "invite": 0,
}
"""The single levels of a power levels event, with the default for a missing value or event."""

_DIGITS_MAX: Final = 308
"""As many as a double has; longer numbers are out of range."""


def read_level(value: object, version: RoomVersion) -> int | None:
    """Return the level that a JSON value represents, or None if the room version accepts none.

    Integers always; up to version 9 also text in base 10 with optional sign, leading zeros and
    surrounding white space; up to version 5 also finite floats, truncated towards zero.
    """
    if type(value) is int:
        return value
    if version.power_levels == "integer":
        return None
    if isinstance(value, str):
        return _read_text(value.strip())
    if version.power_levels == "float" and isinstance(value, float) and math.isfinite(value):
        return int(value)
    return None


def _read_text(text: str) -> int | None:
    """Return the number in base 10, or None.

    The length is checked first, because `int` raises for very long text.
    """
    digits = text[1:] if text[:1] in {"+", "-"} else text
    if not (digits.isascii() and digits.isdigit()):
        return None
    significant = digits.lstrip("0") or "0"
    if len(significant) > _DIGITS_MAX:
        return None
    return -int(significant) if text[0] == "-" else int(significant)


def creator_of(create: Event, version: RoomVersion) -> object:
    """Return the user who has level 100 while there are no power levels.

    It is `content.creator`, and from version 11 on the sender.
    """
    return create.sender if version.creator_is_sender else create.content.get("creator")


def is_privileged_creator(user_id: str, create: Event) -> bool:
    """Return whether the user sent the create event or is one of its `additional_creators`.

    Only room version 12 gives them the creator level.
    """
    if user_id == create.sender:
        return True
    additional = create.content.get("additional_creators")
    return isinstance(additional, list) and user_id in additional


class PowerLevels:
    """The levels under one power levels event (or none) and one create event (or none)."""

    __slots__ = ("_content", "_create", "_version")

    def __init__(
        self, power_levels: Event | None, create: Event | None, version: RoomVersion
    ) -> None:
        self._content: Mapping[str, Any] | None = (
            None if power_levels is None else power_levels.content
        )
        self._create = create
        self._version = version

    @classmethod
    def of(cls, auth_state: Mapping[StateKey, Event], version: RoomVersion) -> "PowerLevels":
        return cls(auth_state.get(POWER_LEVELS), auth_state.get(CREATE), version)

    def user(self, user_id: str) -> Level:
        create = self._create
        if (
            create is not None
            and self._version.privileged_creators
            and is_privileged_creator(user_id, create)
        ):
            return CREATOR_LEVEL
        if self._content is None:
            return 100 if create is not None and creator_of(create, self._version) == user_id else 0
        level = self._entry("users", user_id)
        return self.named("users_default") if level is None else level

    def named(self, name: str) -> int:
        """Return one of the single levels in `DEFAULTS`, such as `ban` or `state_default`."""
        if self._content is not None:
            level = read_level(self._content.get(name), self._version)
            if level is not None:
                return level
        return DEFAULTS[name]

    def required(self, event: Event) -> int:
        """Return the level required to send such an event.

        It is its type's entry in `events`, else the default for state events or for other events.
        """
        level = self._entry("events", event.type)
        if level is not None:
            return level
        return self.named("events_default" if event.state_key is None else "state_default")

    def _entry(self, group: str, name: str) -> int | None:
        entries = None if self._content is None else self._content.get(group)
        if not isinstance(entries, dict):
            return None
        return read_level(entries.get(name), self._version)


Levels = Mapping[str, int]

_MISSING: Final = object()


def check_power_levels(
    event: Event, auth_state: Mapping[StateKey, Event], version: RoomVersion, sender_level: Level
) -> None:
    """Raise AuthDenied where the new levels are malformed or the sender may not make the change."""
    new = _single_levels(event, version)
    new_groups = {group: _group(event, group, version) for group in _groups(version)}
    new_users = _group(event, "users", version)
    for user_id in new_users:
        if not is_user_id(user_id):
            raise denied(event, "power_levels.users", f"not a user id: {user_id!r}")
    if version.privileged_creators:
        _check_no_creator(event, new_users, auth_state[CREATE])
    current = auth_state.get(POWER_LEVELS)
    if current is None:
        return
    _check_changes(event, "", _readable(current.content, DEFAULTS, version), new, sender_level)
    for group, entries in new_groups.items():
        _check_changes(
            event,
            f"{group}.",
            _readable_group(current.content, group, version),
            entries,
            sender_level,
        )
    _check_users(event, _readable_group(current.content, "users", version), new_users, sender_level)


def _groups(version: RoomVersion) -> tuple[str, ...]:
    return ("events", "notifications") if version.limit_notifications_power else ("events",)


def _single_levels(event: Event, version: RoomVersion) -> Levels:
    levels: dict[str, int] = {}
    for name in DEFAULTS:
        value = event.content.get(name, _MISSING)
        if value is _MISSING:
            continue
        level = read_level(value, version)
        if level is None:
            raise denied(
                event,
                "power_levels.malformed",
                f"{name} is {value!r} in room version {version.identifier}",
            )
        levels[name] = level
    return levels


def _group(event: Event, group: str, version: RoomVersion) -> Levels:
    """Return the entries of `events`, `notifications` or `users` in a new event."""
    entries = event.content.get(group, _MISSING)
    if entries is _MISSING:
        return {}
    if not isinstance(entries, dict):
        raise denied(
            event,
            "power_levels.malformed",
            f"{group} is not an object but {type(entries).__name__}",
        )
    levels: dict[str, int] = {}
    for name, value in entries.items():
        level = read_level(value, version)
        if level is None:
            raise denied(
                event,
                "power_levels.malformed",
                f"{group}.{name} is {value!r} in room version {version.identifier}",
            )
        levels[name] = level
    return levels


def _readable_group(content: Mapping[str, Any], group: str, version: RoomVersion) -> Levels:
    entries = content.get(group)
    return _readable(entries, entries, version) if isinstance(entries, dict) else {}


def _readable(source: Mapping[str, Any], names: Mapping[str, Any], version: RoomVersion) -> Levels:
    """Return the named entries of the current event; unreadable values count as absent."""
    levels = ((name, read_level(source.get(name), version)) for name in names)
    return {name: level for name, level in levels if level is not None}


def _check_no_creator(event: Event, users: Levels, create: Event) -> None:
    for user_id in users:
        if is_privileged_creator(user_id, create):
            raise denied(event, "power_levels.creator", f"gives creator {user_id} a level")


def _check_changes(event: Event, group: str, old: Levels, new: Levels, sender_level: Level) -> None:
    for name in {**old, **new}:  # not a set: the first refusal is the same in every process
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if before is not None and before > sender_level:
            raise denied(
                event,
                "power_levels.current",
                f"{event.sender} at {sender_level}: {group}{name} {before} -> {after}",
            )
        if after is not None and after > sender_level:
            raise denied(
                event,
                "power_levels.new",
                f"{event.sender} at {sender_level}: {group}{name} {before} -> {after}",
            )


def _check_users(event: Event, old: Levels, new: Levels, sender_level: Level) -> None:
    for user_id in {**old, **new}:  # not a set: the first refusal is the same in every process
        before, after = old.get(user_id), new.get(user_id)
        if before == after:
            continue
        if before is not None and user_id != event.sender and before >= sender_level:
            raise denied(
                event,
                "power_levels.users_current",
                f"{event.sender} at {sender_level}: {user_id} {before} -> {after}",
            )
        if after is not None and after > sender_level:
            raise denied(
                event,
                "power_levels.users_new",
                f"{event.sender} at {sender_level}: {user_id} {before} -> {after}",
            )
