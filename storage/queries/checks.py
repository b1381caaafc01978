"""Arguments of reads: ids have the form of one, users are local, limits lie within theirs.

What Postgres could not take as text (a NUL, half of a surrogate pair) or as a number is refused or taken down here, so that nobody meets
an error of the driver.
"""

from collections.abc import Iterable
from typing import Final

from storage.errors import InputError, InvalidIdentifier
from storage.ids import EventId, RoomId, ServerName, StateKey, UserId, server_name_of

LARGEST: Final = 2**63 - 1


def is_text(value: object) -> bool:
    """Whether it is text that a table could hold. Such as cannot is the id of nothing."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def text(value: str) -> str:
    """It, as it is; `InvalidIdentifier` for what cannot be held as text."""
    if not is_text(value):
        raise InvalidIdentifier(value, "not text that can be held: a NUL, half of a surrogate pair, or no text at all")
    return value


def texts(values: Iterable[str]) -> list[str]:
    """Each of them, as `text`; a single one in their place is refused, too."""
    if isinstance(values, str):
        raise InvalidIdentifier(values, "a list is wanted")
    return [text(value) for value in values]


def keys(pairs: Iterable[StateKey] | None) -> list[StateKey] | None:
    """Each (type, state key) as `text`."""
    return None if pairs is None else [(text(kind), text(state_key)) for kind, state_key in pairs]


def room(room_id: str) -> RoomId:
    """The room id; `InvalidIdentifier` for what is none."""
    if not text(room_id).startswith("!"):
        raise InvalidIdentifier(room_id, "a room id begins with !")
    return RoomId(room_id)


def local_user(user_id: str, server_name: str) -> UserId:
    """The user id; `InvalidIdentifier` for what is none, or a user of another server: who may see what is kept for local users."""
    user(user_id)
    if server_name_of(user_id) != server_name:
        raise InvalidIdentifier(user_id, f"not a user of {server_name}")
    return UserId(user_id)


def user(user_id: str) -> UserId:
    """The user id, of any server; `InvalidIdentifier` for what is none."""
    if not text(user_id).startswith("@") or not server_name_of(user_id):
        raise InvalidIdentifier(user_id, "a user id is @localpart:server")
    return UserId(user_id)


def users(user_ids: Iterable[str]) -> list[UserId]:
    """User ids of any server; `InvalidIdentifier` for what is none."""
    return [user(user_id) for user_id in texts(user_ids)]


def server(server_name: str) -> ServerName:
    """The server name; `InvalidIdentifier` for what cannot be one."""
    if not text(server_name) or server_name[0] in "@!$#" or any(character.isspace() for character in server_name):
        raise InvalidIdentifier(server_name, "not a server name")
    return ServerName(server_name)


def events(event_ids: Iterable[str]) -> list[EventId]:
    """The event ids, each once; `InvalidIdentifier` for what is none."""
    ids = list(dict.fromkeys(texts(event_ids)))
    for event_id in ids:
        if not event_id.startswith("$"):
            raise InvalidIdentifier(event_id, "an event id begins with $")
    return [EventId(event_id) for event_id in ids]


def event(event_id: str) -> EventId:
    """The event id; `InvalidIdentifier` for what is none."""
    return events([event_id])[0]


def limit(number: int, largest: int) -> int:
    """The limit, taken down to the largest one; `InputError` for a negative one, or what is no number."""
    if whole(number, "limit") < 0:
        raise InputError(f"limit {number}: it must not be negative")
    return min(number, largest)


def whole(number: int, name: str) -> int:
    """The number, taken to the nearest one that a table could hold; `InputError` for what is none (True and False are none)."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise InputError(f"{name} {number!r}: a whole number is wanted")
    return max(-LARGEST, min(number, LARGEST))
