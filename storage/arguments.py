"""Validation of the arguments of public methods: ids, local users, lists, numbers.

Postgres refuses a NUL, half of a surrogate pair and a number beyond 64 bits. These are found here,
before anything is sent, so that no caller gets an error of the driver. Reads clamp numbers to 64
bits; methods that write refuse them.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from math import isfinite
from typing import Any, Final, Literal, TypeGuard, TypeVar, cast

import orjson

from storage.errors import InputError, InvalidEvent, InvalidIdentifier
from storage.ids import EventId, RoomId, ServerName, StateKey, UserId, server_name_of
from storage.turns import TURN_ROWS, parts

LARGEST: Final = 2**63 - 1
ACCOUNT_DATA: Final = "account_data"
Ignored = Collection[str] | Literal["account_data"]
"""Users, or those that the reader ignores by their account data m.ignored_user_list."""

T = TypeVar("T")

# -------------------------------------------------------------------------------------------------
# texts


def is_text(value: object) -> TypeGuard[str]:
    """Return whether Postgres could store it as text.

    A value that it cannot store is the id of nothing.
    """
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def text(value: str) -> str:
    """Return it unchanged; raise `InvalidIdentifier` if it cannot be stored as text."""
    if not is_text(value):
        raise InvalidIdentifier(
            value, "not text that can be stored: a NUL, half of a surrogate pair, or no text at all"
        )
    return value


def listed(values: Iterable[T], name: str) -> list[T]:
    """Return the items of a collection.

    Raise `InputError` for a single text, or for a value that is no collection.
    """
    if isinstance(values, str | bytes | bytearray | memoryview):
        raise InputError(f"{name} is {values!r}: a list is wanted, write [{values!r}]")
    if not isinstance(values, Iterable):
        raise InputError(f"{name} is {values!r}: a list is wanted")
    return list(values)


def pdus(values: Iterable[T]) -> list[T]:
    """Return the PDUs of a batch.

    Raise `InputError` for a single PDU, or for a value that is no collection.
    """
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping):
        raise InputError(f"pdus is a single {type(values).__name__}: a list is wanted, write [pdu]")
    return listed(values, "pdus")


def pdu(value: T) -> T:
    """Return one PDU. Raise `InvalidEvent` for a value that is neither bytes nor a dict."""
    if not isinstance(value, bytes | bytearray | memoryview | dict):
        raise InvalidEvent(f"a PDU is bytes or a dict, not {type(value).__name__}")
    return value


def texts(values: Iterable[str], name: str = "ids") -> list[str]:
    """Return each of them as `text`, once; raise `InputError` for a single text."""
    items = listed(values, name)
    return distinct(items if _are_ascii(items) else [text(value) for value in items])


def possible(values: Iterable[str]) -> list[EventId]:
    """Return those of the values that are texts which can be stored, each once."""
    return distinct(EventId(value) for value in listed(values, "event_ids") if is_text(value))


async def many(check: Callable[[Iterable[Any]], list[T]], values: Iterable[Any]) -> list[T]:
    """Return what a check of a list returns; a long list is checked in parts (`storage.turns`)."""
    items = list(values) if isinstance(values, Iterator) else values
    if isinstance(items, str) or not isinstance(items, Sized) or len(items) <= TURN_ROWS:
        return check(items)
    checked: dict[T, None] = {}
    async for part in parts(list(items)):
        checked.update(dict.fromkeys(check(part)))
    return list(checked)


def distinct(values: Iterable[T]) -> list[T]:
    """Return each of them once, in their order."""
    return list(dict.fromkeys(values))


def _are_ascii(values: list[Any]) -> bool:
    """Return whether all are texts without NUL or surrogates, as ids nearly always are."""
    try:
        joined = "\0".join(values)
    except TypeError:
        return False
    return joined.isascii() and joined.count("\0") == max(0, len(values) - 1)


def filtered(values: Iterable[str] | None, name: str) -> tuple[str, ...] | None:
    """Return the names of a filter, without those that cannot be stored: they match nothing.

    None means no filter.
    """
    if values is None:
        return None
    names = listed(values, name)
    for item in names:
        if not isinstance(item, str):
            raise InputError(f"{name} holds {item!r}: a list of texts is wanted")
    return tuple(dict.fromkeys(item for item in names if is_text(item)))


def keys(pairs: Iterable[StateKey] | None) -> list[StateKey] | None:
    """Return each (type, state key) as `text`, once.

    Raise `InputError` for an item that is no pair.
    """
    return None if pairs is None else distinct(_key(pair) for pair in listed(pairs, "keys"))


def _key(pair: object) -> StateKey:
    if (
        not isinstance(pair, Sequence)
        or isinstance(pair, str | bytes | bytearray)
        or len(pair) != 2
    ):
        raise InputError(
            f'keys holds {pair!r}: pairs are wanted, write [("m.room.member", "@user:server")]'
        )
    kind, state_key = pair
    return text(kind), text(state_key)


# ------------------------------------------------------------------------------------------------
# ids


def room(room_id: str) -> RoomId:
    """Return the room id; raise `InvalidIdentifier` for another value."""
    if not text(room_id).startswith("!"):
        raise InvalidIdentifier(room_id, "a room id begins with !")
    return RoomId(room_id)


def rooms(room_ids: Iterable[str]) -> list[RoomId]:
    """Return the room ids, each once; raise `InvalidIdentifier` for another value."""
    return [room(room_id) for room_id in texts(room_ids, "room_ids")]


def local_user(user_id: str, server_name: str) -> UserId:
    """Return the user id.

    Raise `InvalidIdentifier` for another value or a user of another server.
    """
    user(user_id)
    if server_name_of(user_id) != server_name:
        raise InvalidIdentifier(user_id, f"not a user of {server_name}")
    return UserId(user_id)


def user(user_id: str) -> UserId:
    """Return the user id, of any server; raise `InvalidIdentifier` for another value."""
    if not text(user_id).startswith("@") or not server_name_of(user_id):
        raise InvalidIdentifier(user_id, "a user id is @localpart:server")
    return UserId(user_id)


def users(user_ids: Iterable[str], name: str = "ignored") -> list[UserId]:
    """Return user ids of any server, each once; raise `InvalidIdentifier` for another value."""
    return distinct(user(user_id) for user_id in listed(user_ids, name))


def ignored(user_ids: Ignored) -> list[UserId] | None:
    """Return the ignored users; None for those that the account data of the reader lists."""
    if isinstance(user_ids, str):
        if user_ids != ACCOUNT_DATA:
            raise InputError(f"ignored is {user_ids!r}: {ACCOUNT_DATA} or user ids are wanted")
        return None
    return users(user_ids)


def server(server_name: str) -> ServerName:
    """Return the server name; raise `InvalidIdentifier` for another value."""
    if (
        not text(server_name)
        or server_name[0] in "@!$#"
        or any(character.isspace() for character in server_name)
    ):
        raise InvalidIdentifier(server_name, "not a server name")
    return ServerName(server_name)


SERVER_NAME: Final[re.Pattern[str]] = re.compile(
    r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Za-z.-]{1,230})(?::[0-9]{1,5})?"
)
"""A server name: host or address, and perhaps a port (appendices, "Server name")."""


def own_server(server_name: str) -> ServerName:
    """Return the name of the own server, for ever the part of its users after the colon.

    Raise `InvalidIdentifier` for a value that the specification does not allow.
    """
    if SERVER_NAME.fullmatch(text(server_name)) is None:
        raise InvalidIdentifier(server_name, "a server name is host or host:port")
    return ServerName(server_name)


def events(event_ids: Iterable[str]) -> list[EventId]:
    """Return the event ids, each once; raise `InvalidIdentifier` for another value."""
    ids = texts(event_ids, "the event ids")
    if "".join([event_id[:1] for event_id in ids]) != "$" * len(ids):
        wrong = next(event_id for event_id in ids if not event_id.startswith("$"))
        raise InvalidIdentifier(wrong, "an event id begins with $")
    return cast("list[EventId]", ids)  # thousands, for an auth chain


def event(event_id: str) -> EventId:
    """Return the event id; raise `InvalidIdentifier` for another value."""
    return events([event_id])[0]


ID_BYTES_MAX: Final = 255
"""The longest id that a client may choose, as of all ids of Matrix."""


def transaction(value: Any) -> tuple[str, str]:
    """Return a device id and a transaction id.

    Raise `InputError` for a value that is no such pair.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InputError(f"transaction is {value!r}: write (device_id, transaction_id)")
    device_id, transaction_id = value
    return _client_id(device_id), _client_id(transaction_id)


def _client_id(value: str) -> str:
    if not 0 < len(text(value).encode()) <= ID_BYTES_MAX:
        raise InvalidIdentifier(value, f"an id of a transaction has 1 to {ID_BYTES_MAX} bytes")
    return value


MEMBERSHIPS: Final = ("ban", "invite", "join", "knock", "leave")


def membership(value: str, name: str = "membership") -> str:
    """Return it; raise `InputError` for a value that is no membership."""
    if not is_text(value) or value not in MEMBERSHIPS:
        raise InputError(f"{name} is {value!r}: one of {', '.join(MEMBERSHIPS)} is wanted")
    return value


def memberships(values: Iterable[str], name: str = "memberships") -> list[str]:
    """Return each of them as `membership`, once; raise `InputError` for a single text."""
    return distinct(membership(value, name) for value in listed(values, name))


# ------------------------------------------------------------------------------------------------
# numbers


def limit(number: int, largest: int, name: str = "limit") -> int:
    """Return the limit, at most the largest one.

    Raise `InputError` for a negative one, or for a value that is no number.
    """
    if whole(number, name) < 0:
        raise InputError(f"{name} {number}: it must not be negative")
    return min(number, largest)


def whole(number: int, name: str) -> int:
    """Return the number, clamped to 64 bits.

    Raise `InputError` for another value, also for True and False.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise InputError(f"{name} {number!r}: a whole number is wanted")
    return max(-LARGEST - 1, min(number, LARGEST))


def positive(number: float, name: str, *, whole: bool) -> None:
    """Raise `InputError` unless it is a number above 0, and a whole one if ``whole``."""
    is_number = isinstance(number, int if whole else (int, float)) and not isinstance(number, bool)
    if not is_number or not number > 0:
        raise InputError(f"{name} is {number!r}: a positive number is wanted")


def position(number: int, name: str) -> int:
    """Return a position of a stream, or a number of its rows.

    Raise `InputError` for a value that is no number from 0 to 2^63-1.
    """
    if whole(number, name) != number or number < 0:
        raise InputError(f"{name} {number}: it must be a whole number from 0 to 2^63-1")
    return number


# ------------------------------------------------------------------------------------------------
# other values


def flag(value: bool, name: str) -> bool:
    """Return it; raise `InputError` unless it is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}: it must be True or False")
    return value


def instance(value: T, kind: type[T], name: str) -> T:
    """Return it; raise `InputError` for a value of another type."""
    if not isinstance(value, kind):
        raise InputError(f"{name} is {value!r}: a {kind.__name__} is wanted")
    return value


def mapping(value: Mapping[Any, T], name: str) -> Mapping[Any, T]:
    """Return it; raise `InputError` unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name} is {value!r}: a mapping is wanted")
    return value


def room_versions(value: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return room versions by room id; raise `InputError` unless all are strings."""
    versions = {} if value is None else mapping(value, "room_versions")
    for version in versions.values():
        instance(version, str, "a version in room_versions")
    return versions


def signing_key(value: Any) -> Any:
    """Return a key of signedjson that signs; raise `InputError` for another value."""
    if not (callable(getattr(value, "sign", None)) and {"alg", "version"} <= set(dir(value))):
        raise InputError(
            f"signing_key is a {type(value).__name__}: a signing key of signedjson is wanted, "
            "such as read_signing_keys(file)[0]"
        )
    return value


def content(value: Mapping[str, Any], name: str) -> bytes:
    """Return a JSON object as bytes.

    Raise `InputError` for values that JSON, UTF-8 or 64 bits cannot represent.
    """
    return json_value(dict(mapping(value, name)), name)


def json_value(value: Any, name: str) -> bytes:
    """Return any value of JSON as bytes. Raise `InputError` as `content`."""
    try:
        packed = orjson.dumps(value, option=PLAIN)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name} cannot be written as JSON: {error}") from error
    if b"null" in packed and not _is_finite(value):  # the encoder writes NaN and infinity as null
        raise InputError(f"{name} holds a number that JSON cannot: NaN or infinity")
    return packed


PLAIN: Final = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
"""Only the types of JSON: no dates, no dataclasses."""


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, Mapping):
        return all(_is_finite(item) for item in value.values())
    return not isinstance(value, list | tuple) or all(_is_finite(item) for item in value)
