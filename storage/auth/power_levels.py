"""The rule on `m.room.power_levels`: its form, and the changes that a sender may make.

A property or entry that is absent has no value of its own. Adding one is checked against the new
value, removing one against the old value, as the specification reads and Synapse does. Other
servers use the default in its place. Up to version 9 the specification requires well-formed `users`
only. A malformed other level is refused here as well, because those versions define the format of a
level.

Source: room versions 1 to 12, authorization rules, rule "If type is m.room.power_levels".
"""

from collections.abc import Mapping
from typing import Any, Final

from storage.auth.level_lookup import DEFAULTS, Level, is_privileged_creator, read_level
from storage.auth.state_keys import CREATE, POWER_LEVELS, denied, is_user_id
from storage.event import Event, RoomVersion
from storage.ids import StateKey

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
