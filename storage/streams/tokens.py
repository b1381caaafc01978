"""Tokens: positions as opaque text that clients keep, across restarts, purges and upgrades.

A sync token holds one vector position per stream. A pagination token holds one topological position
of a room:

    s1~4f2a90c1~account__data.7~events.53.main-60.w2-71~9c3ab84e
    p1~4f2a90c1~120.4711~0be5d201
    p1~4f2a90c1~260.4711~9~b120.4700.7~2d7cf5b2
    │  │        │       └ CRC-32 of all before it
    │  │        └ sync: stream.min, then .writer-position for each writer above min;
    │  │          pagination: topological.stream, and .live if it is next to a timeline, then the
    │  │          moves of the room by then, if any, and levels;
    │  │          rooms: last activity.room~, then as sync;
    │  │          connection: nid.number~, then as sync, and after ~- as sync what extensions cover
    │  └ eight digits of the deployment (the database), so that a token of another one is refused
    └ kind and version of the form

Every character is one that a URL leaves unescaped. There is exactly one text for a token: a text
that does not print again as it was read is refused. The checksum finds damage (every change of up
to four neighbouring characters for certain, others but for one in 2^32). It is no signature, and
need not be: a token only gives a read position, never visibility.
"""

import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, Self, TypeVar

from storage.errors import InvalidToken
from storage.streams.positions import LARGEST_POSITION, VectorPosition

VERSION: Final = 1
# of a pagination token: each has a bit of an int8 (reordered_across), and its text fits
CURSOR_POSITIONS_MAX: Final = 60
LARGEST_TOKEN: Final = 8192  # characters; anything longer is refused without parsing
# recently read or printed sync tokens: clients that are up to date have the same position
TOKENS_KEPT: Final = 1024
SYNC, PAGINATION, ROOMS, CONNECTION = "s", "p", "r", "c"
_KINDS: Final = {SYNC: "sync", PAGINATION: "pagination", ROOMS: "rooms", CONNECTION: "connection"}
_PLAIN: Final = re.compile(r"[^A-Za-z0-9]")
_ESCAPED: Final = re.compile(r"__|_(10[0-9A-F]{4}|[0-9A-F]{1,5})_")
_CURSOR_POSITION: Final = re.compile(r"([bf])(\d+)\.(\d+)\.(\d+)")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}")


@lru_cache(maxsize=16)
def deployment_mark(deployment: str) -> str:
    """Return the eight digits of a deployment id (any text that no two databases share)."""
    return hashlib.sha256(deployment.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class SyncToken:
    """A position in every stream: `streams` holds (stream name, position), sorted by name.

    `of` sorts a mapping.

    `<=` is the partial order of its positions; a stream that a token does not name is at 0 in it.
    """

    streams: tuple[tuple[str, VectorPosition], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.streams]
        if names != sorted(set(names)):
            raise ValueError(f"the streams must be sorted and distinct: {names}")

    @classmethod
    def of(cls, positions: Mapping[str, VectorPosition]) -> Self:
        """Return the token with exactly these positions."""
        return cls(tuple(sorted(positions.items())))

    @classmethod
    def parse(cls, text: str, deployment: str) -> "SyncToken":
        """Read the text of `print(deployment)`; raise InvalidToken with the reason."""
        return _sync_token(_text(text), deployment)

    def print(self, deployment: str) -> str:
        """Return this token as text, for clients of this deployment only."""
        return _sync_text(self, deployment)

    def positions(self) -> dict[str, VectorPosition]:
        """Return the position in each stream, as a new dict."""
        return dict(self.streams)

    def position(self, stream: str) -> VectorPosition | None:
        """Return the position in `stream`.

        Return None if the token is from before an upgrade that added the stream.
        """
        return next((position for name, position in self.streams if name == stream), None)

    def advance(self, stream: str, position: VectorPosition) -> Self:
        """Return this token merged with `position` in `stream`; it never goes back."""
        previous = self.position(stream)
        return self.of(
            self.positions() | {stream: position if previous is None else previous.merge(position)}
        )

    def bound(self, current: Mapping[str, VectorPosition]) -> Self:
        """Return this token with positions limited to `current`, and without removed streams.

        A token may come from the future: from another process that is ahead, or from before the
        restore of a database.
        """
        bound = tuple(
            (name, position.meet(current[name]))
            for name, position in self.streams
            if name in current
        )
        return self if bound == self.streams else type(self)(bound)

    def __le__(self, other: Self) -> bool:
        """Return whether `other` is at the same position or further in every stream.

        It is no total order: `not a <= b` is not `b < a`.
        """
        theirs = other.positions()
        return all(
            position <= theirs.get(name, VectorPosition()) for name, position in self.streams
        )

    def __lt__(self, other: Self) -> bool:
        return self <= other and not other <= self

    def __ge__(self, other: Self) -> bool:
        return other <= self

    def __gt__(self, other: Self) -> bool:
        return other < self

    @classmethod
    def _read_body(cls, body: str) -> Self:
        if not body:
            return cls()
        named = (part.partition(".") for part in body.split("~"))
        return cls(tuple((_unescape(name), _read_vector(position)) for name, _, position in named))


@lru_cache(maxsize=TOKENS_KEPT)
def _sync_token(text: str, deployment: str) -> SyncToken:
    """Read as `SyncToken.parse`."""
    # a part of that class; outside of it for its cache
    return _parse(SYNC, text, deployment, SyncToken._read_body)  # noqa: SLF001


@lru_cache(maxsize=TOKENS_KEPT)
def _sync_text(token: SyncToken, deployment: str) -> str:
    """Print as `SyncToken.print`."""
    return _print(SYNC, _print_streams(token), deployment)


class CursorPosition(NamedTuple):
    """A topological position in a room, as of a number of moves of the room (rooms.moves)."""

    topological: int
    stream: int
    moves: int


@dataclass(frozen=True, slots=True, order=True)
class PaginationToken:
    """A topological position in a room: after the event at (topological, stream).

    It is before all larger events. Hence a backward page begins with the largest event <=
    (topological, stream), and a forward page with the smallest one above. The position before every
    event is (0, 0): the orderings of events begin at 1.

    A position next to a timeline also has `live`: of the live events only those up to this stream
    ordering are behind it. So paging back from a timeline (which is in stream order) returns each
    event that is not in it, and none that is.

    Events may move up in the order (`storage.graph.topological_ordering`). `moves` gives the state
    of the order that the position refers to; a token from before moves were counted has 0. A page
    may end among events that have moved past its position. Such a reader has read two ranges that
    do not meet: `earlier` holds its former positions, lowest first, and `direction` its direction
    (b or f). Ahead of a backward reader are the events at or below each of these positions and the
    last one, each as of its moves. Ahead of a forward reader are the events above each.

    A forward reader may begin next to a timeline, as at a sync token. Until it has passed that
    position, the position is the first of `earlier`, and the token has `live`, too: below that
    position only live events after this stream ordering are ahead.
    """

    topological: int
    stream: int
    live: int = LARGEST_POSITION
    moves: int = 0
    direction: str = ""
    earlier: tuple[CursorPosition, ...] = ()

    def __post_init__(self) -> None:
        for number in (
            self.topological,
            self.stream,
            self.live,
            self.moves,
            *(number for level in self.earlier for number in level),
        ):
            if not 0 <= number <= LARGEST_POSITION:
                raise ValueError(f"{number} is not an ordering (0 to 2^63-1)")
        if len(self.earlier) >= CURSOR_POSITIONS_MAX or bool(self.earlier) != (
            self.direction in ("b", "f")
        ):
            count = len(self.earlier)
            raise ValueError(f"{count} earlier positions in direction {self.direction!r}")

    @property
    def sync_cursor(self) -> CursorPosition | None:
        """Return where a forward reader began next to a timeline, if it has not passed that yet."""
        return self.earlier[0] if self.direction == "f" and self.live < LARGEST_POSITION else None

    @property
    def cursor_positions(self) -> tuple[CursorPosition, ...]:
        """Return the earlier positions and the last one."""
        return (*self.earlier, CursorPosition(self.topological, self.stream, self.moves))

    @classmethod
    def parse(cls, text: str, deployment: str) -> Self:
        """Read the text of `print(deployment)`; raise InvalidToken with the reason."""
        return _parse(PAGINATION, text, deployment, cls._read_body)

    def print(self, deployment: str) -> str:
        """Return this token as text, for clients of this deployment only."""
        live = "" if self.live == LARGEST_POSITION else f".{self.live}"
        moves = f"~{self.moves}" if self.moves or self.earlier else ""
        earlier = "".join(
            [
                f"~{self.direction}{level.topological}.{level.stream}.{level.moves}"
                for level in self.earlier
            ]
        )
        return _print(
            PAGINATION, f"{self.topological}.{self.stream}{live}{moves}{earlier}", deployment
        )

    @classmethod
    def _read_body(cls, body: str) -> Self:
        position, *rest = body.split("~")
        topological, stream, *live = (_read_number(part) for part in position.split("."))
        moves = _read_number(rest[0]) if rest else 0
        earlier = [_read_cursor_position(part) for part in rest[1:]]
        direction = earlier[0][0] if earlier else ""
        return cls(
            topological,
            stream,
            live[0] if live else LARGEST_POSITION,
            moves,
            direction,
            tuple(level for _, level in earlier),
        )


@dataclass(frozen=True, slots=True)
class RoomsToken:
    """The next part of an initial sync: the rooms below (activity, room), as of `upto`."""

    upto: SyncToken
    activity: int  # stream ordering of the latest live event of the last returned room
    room: int  # its nid, a tie-break

    @classmethod
    def parse(cls, text: str, deployment: str) -> Self:
        """Read the text of `print(deployment)`; raise InvalidToken with the reason."""
        return _parse(ROOMS, text, deployment, cls._read_body)

    def print(self, deployment: str) -> str:
        """Return this token as text, for clients of this deployment only."""
        return _print(ROOMS, f"{self.activity}.{self.room}~{_print_streams(self.upto)}", deployment)

    @classmethod
    def _read_body(cls, body: str) -> Self:
        position, _, upto = body.partition("~")
        activity, _, room = position.partition(".")
        streams = SyncToken._read_body(upto)  # noqa: SLF001  # the same module
        return cls(streams, _read_number(activity), _read_number(room))


@dataclass(frozen=True, slots=True)
class PosToken:
    """A `pos` of sliding sync: a state of a connection, and the positions that it covers.

    ``extensions`` are the positions that extensions cover. A stream is in it only where that is not
    the one in ``upto``: no request had the extension, or there were too many messages.
    """

    connection: int
    number: int
    upto: SyncToken
    extensions: SyncToken = SyncToken()

    @classmethod
    def parse(cls, text: str, deployment: str) -> Self:
        """Read the text of `print(deployment)`; raise InvalidToken with the reason."""
        return _parse(CONNECTION, text, deployment, cls._read_body)

    def print(self, deployment: str) -> str:
        """Return this token as text, for clients of this deployment only."""
        extensions = f"~-~{_print_streams(self.extensions)}" if self.extensions.streams else ""
        state = f"{self.connection}.{self.number}"
        return _print(CONNECTION, f"{state}~{_print_streams(self.upto)}{extensions}", deployment)

    @property
    def covered(self) -> SyncToken:
        """Return the positions up to which the client has the facts of each stream."""
        return SyncToken.of(self.upto.positions() | self.extensions.positions())

    @classmethod
    def _read_body(cls, body: str) -> Self:
        state, _, streams = body.partition("~")
        connection, _, number = state.partition(".")
        upto, _, extensions = streams.partition("~-~")
        read = SyncToken._read_body  # noqa: SLF001  # the same module
        return cls(_read_number(connection), _read_number(number), read(upto), read(extensions))


def is_rooms_token(text: object) -> bool:
    """Return whether a text looks like a `RoomsToken`; `parse` checks it."""
    return isinstance(text, str) and text.startswith(ROOMS)


def is_sync_token(text: object) -> bool:
    """Return whether a text looks like one for `read_positions`, which checks it."""
    return isinstance(text, str) and text.startswith((SYNC, CONNECTION))


def is_foreign_pos(text: str, deployment: str) -> bool:
    """Return whether a text is an intact `PosToken` of another deployment."""
    head, _, checksum = text.rpartition("~")
    if not (text.startswith(f"{CONNECTION}{VERSION}~") and text.isascii()):
        return False
    return checksum == _checksum(head) and head.split("~")[1] != deployment_mark(deployment)


def read_positions(text: str, deployment: str) -> SyncToken:
    """Return the positions of the text of a `SyncToken` or a `PosToken`. `InvalidToken`."""
    if _text(text).startswith(CONNECTION):
        return PosToken.parse(text, deployment).covered
    return SyncToken.parse(text, deployment)


def print_position(position: VectorPosition) -> str:
    """Return the position in one stream as text: ``5``, or ``5.w2-9`` with writers above 5."""
    return _print_vector(position)


def read_position(text: str) -> VectorPosition:
    """Return the position of a text of `print_position`. `InvalidToken`."""
    if len(_text(text)) > LARGEST_TOKEN:
        raise InvalidToken(text[:LARGEST_TOKEN], "it is too long")
    try:
        position = _read_vector(text)
    except ValueError as error:
        raise InvalidToken(text, str(error)) from error
    if _print_vector(position) != text:
        raise InvalidToken(text, "it is not in its normal form")
    return position


class _Token(Protocol):
    def print(self, deployment: str) -> str: ...


_AnyToken = TypeVar("_AnyToken", bound=_Token)


def _print(kind: str, body: str, deployment: str) -> str:
    head = f"{kind}{VERSION}~{deployment_mark(deployment)}~{body}"
    return f"{head}~{_checksum(head)}"


def _parse(
    kind: str, text: str, deployment: str, read_body: Callable[[str], _AnyToken]
) -> _AnyToken:
    _text(text)
    try:
        token = read_body(_open(kind, text, deployment))
    except ValueError as error:
        raise InvalidToken(text[:LARGEST_TOKEN], str(error)) from error
    if token.print(deployment) != text:
        raise InvalidToken(text, "it is not in its normal form")
    return token


def _text(text: str) -> str:
    if not isinstance(text, str):
        raise InvalidToken(repr(text)[:LARGEST_TOKEN], "it is no text")
    return text


def _open(kind: str, text: str, deployment: str) -> str:
    """Return the body of a token of this kind, after every check that does not read the body."""
    if len(text) > LARGEST_TOKEN:
        raise ValueError(f"it has {len(text)} characters, more than {LARGEST_TOKEN}")
    head, _, checksum = text.rpartition("~")
    if not text.isascii() or checksum != _checksum(head):
        raise ValueError("it is damaged, or not a token of this server: the checksum is wrong")
    kind_version, mark, body = (*head.split("~", 2), "", "")[:3]
    if kind_version[1:] != str(VERSION):
        raise ValueError(f"its version is {kind_version[1:]!r}; known is {VERSION}")
    if kind_version[0] != kind:
        raise ValueError(
            f"it is a {_KINDS.get(kind_version[0], 'strange')} token, "
            f"where a {_KINDS[kind]} token is needed"
        )
    if mark != deployment_mark(deployment):
        raise ValueError("it was made by another deployment (another database)")
    return body


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode('ascii')):08x}"


def _print_streams(token: SyncToken) -> str:
    return "~".join(
        f"{_escape(name)}.{_print_vector(position)}" for name, position in token.streams
    )


def _print_vector(position: VectorPosition) -> str:
    return ".".join(
        [str(position.min), *(f"{_escape(writer)}-{number}" for writer, number in position.items)]
    )


def _read_vector(text: str) -> VectorPosition:
    minimum, *further = text.split(".")
    items = (item.partition("-") for item in further)
    return VectorPosition(
        _read_number(minimum),
        tuple((_unescape(writer), _read_number(number)) for writer, _, number in items),
    )


def _read_number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not a position")
    return int(text)


def _read_cursor_position(text: str) -> tuple[str, CursorPosition]:
    match = _CURSOR_POSITION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a topological position")
    return match[1], CursorPosition(*(_read_number(number) for number in match.groups()[1:]))


@lru_cache(maxsize=1024)
def _escape(name: str) -> str:
    """Escape a name: keep letters and digits, double `_`, and write others as code points.

    `a-b_c` becomes `a_2D_b__c`.
    """
    return _PLAIN.sub(lambda match: "__" if match[0] == "_" else f"_{ord(match[0]):X}_", name)


@lru_cache(maxsize=1024)  # nearly always the same few names
def _unescape(name: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)) if match[1] else "_", name)
