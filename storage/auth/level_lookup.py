"""Power levels: the number formats of a room version, and the level of a user, type or action.

`PowerLevels` reads an `m.room.power_levels` content lazily, one level at a time. So checking a
message in a room with 20,000 entries in `users` costs a few dictionary look-ups and needs no cache.
A value that is not a level of the room version counts as absent here. `storage.auth.power_levels`
refuses events that carry one.

Source: client-server API, m.room.power_levels; room versions 1 (strings), 2 (floats), 10
(integers), 12 (creators).
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from storage.auth.state_keys import CREATE, POWER_LEVELS
from storage.event import Event, RoomVersion
from storage.ids import StateKey

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
        """Build the levels that apply in a state."""
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
