"""Arguments of reads: ids have the form of one, users are local, limits lie within theirs."""

from collections.abc import Iterable

from storage.errors import InputError, InvalidIdentifier
from storage.ids import EventId, ServerName, UserId, server_name_of


def local_user(user_id: str, server_name: str) -> UserId:
    """The user id; `InvalidIdentifier` for what is none, or a user of another server: who may see what is kept for local users."""
    user(user_id)
    if server_name_of(user_id) != server_name:
        raise InvalidIdentifier(user_id, f"not a user of {server_name}")
    return UserId(user_id)


def user(user_id: str) -> UserId:
    """The user id, of any server; `InvalidIdentifier` for what is none."""
    if not user_id.startswith("@") or not server_name_of(user_id) or "\0" in user_id:
        raise InvalidIdentifier(user_id, "a user id is @localpart:server")
    return UserId(user_id)


def server(server_name: str) -> ServerName:
    """The server name; `InvalidIdentifier` for what cannot be one."""
    if not server_name or server_name[0] in "@!$#" or any(character.isspace() or character == "\0" for character in server_name):
        raise InvalidIdentifier(server_name, "not a server name")
    return ServerName(server_name)


def events(event_ids: Iterable[str]) -> list[EventId]:
    """The event ids, each once; `InvalidIdentifier` for what is none."""
    ids = list(dict.fromkeys(event_ids))
    for event_id in ids:
        if not event_id.startswith("$") or "\0" in event_id:
            raise InvalidIdentifier(event_id, "an event id begins with $")
    return [EventId(event_id) for event_id in ids]


def limit(number: int, largest: int) -> int:
    """The limit, taken down to the largest one; `InputError` for a negative one."""
    if number < 0:
        raise InputError(f"limit {number}: it must not be negative")
    return min(number, largest)
