"""The commands of the replication protocol, one line each.

`parse(line)` returns a command, `str(command)` the line again. Pure. The source is the replication
document and the forms that existing workers send and understand:

    SERVER <server_name>              NAME <name for people>
    PING <anything>                   ERROR <reason>
    REPLICATE                         CLEAR_USER_SYNC <worker>
    FEDERATION_ACK <worker> <token>   REMOTE_SERVER_UP <server_name>
    NEW_ACTIVE_TASK <task>            CANCEL_TASK <task>
    RDATA <stream> <writer> <token or "batch"> <row as JSON>
    POSITION <stream> <writer> <previous token> <new token>
    USER_SYNC <worker> <user> <device or "None"> <start|end> <last_sync_ms>
    LOCK_RELEASED [<worker>, <lock name>, <lock key>]
    USER_IP <user> [<access token>, <ip>, <user agent>, <device>, <last_seen_ms>]

Workers before early 2024 omit the device of USER_SYNC; `has_device` keeps the form of a line. JSON
is written without spaces and in ASCII, as those workers do. A line that was read stays unchanged.

Every command object can be sent: its constructor raises ProtocolError for values that would not
survive the line. `encode` checks the length (LINE_BYTES_MAX, without the line feed).
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self, get_type_hints

import orjson

from storage.errors import ProtocolError

# --------------------------------------------------------------------------------------------------
# The fields of replication commands: reading and checking single arguments.

LARGEST_TOKEN: Final = 2**63 - 1
LINE_BREAK: Final = re.compile(r"[\r\n]")
SHOWN_MAX: Final = 200
"""Characters of a wrong argument in an error."""

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,18}")
_SPACE: Final = re.compile(r"[ \r\n]")


def split(text: str, count: int) -> list[str]:
    """Split the arguments at spaces; the last one may contain spaces."""
    parts = text.split(" ", count - 1)
    if len(parts) != count:
        raise ProtocolError(f"{len(parts) if text else 0} of {count} arguments")
    return parts


def integer(text: str) -> int:
    """Read an integer in its only form."""
    if not _INTEGER.fullmatch(text) or abs(int(text)) > LARGEST_TOKEN:
        raise ProtocolError(f"not a number: {text[:SHOWN_MAX]!r}")
    return int(text)


@lru_cache(maxsize=4096)
def check_word(text: str, what: str) -> None:
    """Raise `ProtocolError` for a text that is empty or contains a space or line break."""
    if not text or _SPACE.search(text):
        raise ProtocolError(f"the {what} {text[:SHOWN_MAX]!r} is empty or holds a space")


def check_text(text: str, what: str) -> None:
    """Raise `ProtocolError` for a text that is blank or contains a line break."""
    if not text.strip():
        raise ProtocolError(f"the {what} is empty")
    check_one_line(text, what)


def check_one_line(text: str, what: str) -> None:
    """Raise `ProtocolError` for a text with a line break."""
    if LINE_BREAK.search(text):
        raise ProtocolError(f"the {what} holds a line break")


def load_json(text: str) -> Any:
    """Read JSON; raise `ProtocolError` for other text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"not JSON: {error}") from None


def dump_json(value: Any) -> str:
    """Return JSON without spaces, in ASCII."""
    try:
        text = orjson.dumps(value).decode()
        return (
            text
            if text.isascii() and "\x7f" not in text
            else json.dumps(value, separators=(",", ":"), allow_nan=False)
        )
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"not a JSON value: {error}") from None


LINE_BYTES_MAX: Final = 16_384
BATCH: Final = "batch"
NO_DEVICE: Final = "None"


class Argument(NamedTuple):
    """A kind of argument: how it is read from a line, and the check of a value to write."""

    read: Callable[[str], Any]
    check: Callable[[Any, str], None]


Word = Annotated[str, Argument(str, check_word)]
Text = Annotated[str, Argument(str, check_text)]
AnyText = Annotated[str, Argument(str, check_one_line)]
Token = Annotated[int, Argument(integer, lambda *_: None)]


@dataclass(frozen=True, slots=True)
class Command:
    """One line. There are no other subclasses than those in this module.

    The fields of most commands are their arguments, each of a kind above. The others have methods
    of their own.
    """

    NAME: ClassVar[str]
    ARGUMENTS: ClassVar[Mapping[str, Argument]]

    def __init_subclass__(cls) -> None:
        cls.ARGUMENTS = {
            name: kind
            for name, hint in get_type_hints(cls, include_extras=True).items()
            for kind in getattr(hint, "__metadata__", ())
        }

    def __post_init__(self) -> None:
        for name, kind in self.ARGUMENTS.items():
            kind.check(getattr(self, name), name.replace("_", " "))

    def arguments(self) -> str:
        """Return the part after the name; empty if there is none."""
        return " ".join(str(getattr(self, name)) for name in self.ARGUMENTS)

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the part after the name."""
        kinds = cls.ARGUMENTS.values()
        if not kinds and text.strip():
            raise ProtocolError(f"{cls.NAME} takes no arguments")
        texts = split(text, len(kinds)) if kinds else []
        return cls(*(kind.read(part) for kind, part in zip(kinds, texts, strict=True)))

    def __str__(self) -> str:
        arguments = self.arguments()
        return f"{self.NAME} {arguments}" if arguments else self.NAME


@dataclass(frozen=True, slots=True)
class ServerCommand(Command):
    """Sent at the start by the server: the homeserver's name."""

    NAME: ClassVar[str] = "SERVER"
    server_name: Word


@dataclass(frozen=True, slots=True)
class Rdata(Command):
    """One row of a stream.

    ``token`` None: more rows with the same token follow, the last of which has it ("batch").
    """

    NAME: ClassVar[str] = "RDATA"
    stream_name: Word
    instance_name: Word
    token: int | None
    row: Any
    text: str | None = field(default=None, compare=False, repr=False)
    """The row in its wire form, as received or as written once."""

    def arguments(self) -> str:
        if self.text is None:
            object.__setattr__(self, "text", dump_json(self.row))
        token = BATCH if self.token is None else self.token
        return f"{self.stream_name} {self.instance_name} {token} {self.text}"

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the part after the name."""
        stream_name, instance_name, token, row = split(text, 4)
        return cls(
            stream_name,
            instance_name,
            None if token == BATCH else integer(token),
            load_json(row),
            row,
        )


@dataclass(frozen=True, slots=True)
class Position(Command):
    """A writer is at ``new_token``, and has written nothing after ``prev_token``.

    A reader that is not there yet has missed rows.
    """

    NAME: ClassVar[str] = "POSITION"
    stream_name: Word
    instance_name: Word
    prev_token: Token
    new_token: Token


@dataclass(frozen=True, slots=True)
class Error(Command):
    """Something went wrong; usually the connection is closed after it."""

    NAME: ClassVar[str] = "ERROR"
    reason: AnyText = ""

    @classmethod
    def of(cls, reason: str) -> Self:
        """Accept any text: replace line breaks by spaces, and cut it to fit a line."""
        return cls(LINE_BREAK.sub(" ", reason)[: LINE_BYTES_MAX // 8])


@dataclass(frozen=True, slots=True)
class Ping(Command):
    """The connection is still alive. ``data`` is usually the time in ms."""

    NAME: ClassVar[str] = "PING"
    data: AnyText = ""


@dataclass(frozen=True, slots=True)
class Name(Command):
    """Sent at the start by the client: its name, for people."""

    NAME: ClassVar[str] = "NAME"
    name: Text


@dataclass(frozen=True, slots=True)
class Replicate(Command):
    """Requests the current position of all streams, and all later changes."""

    NAME: ClassVar[str] = "REPLICATE"


@dataclass(frozen=True, slots=True)
class UserSync(Command):
    """A user has started or stopped syncing on a worker, with one device (None: unknown)."""

    NAME: ClassVar[str] = "USER_SYNC"
    instance_name: str
    user_id: str
    device_id: str | None
    is_syncing: bool
    last_sync_ms: int
    has_device: bool = True
    """Whether the line has a field for the device; older workers have none."""

    def __post_init__(self) -> None:
        check_word(self.instance_name, "instance name")
        check_word(self.user_id, "user id")
        if self.device_id is not None:
            check_one_line(self.device_id, "device id")
        if self.device_id == NO_DEVICE or (self.device_id is not None and not self.has_device):
            raise ProtocolError(
                f"a device id {self.device_id!r} cannot be written in this form of USER_SYNC"
            )

    def arguments(self) -> str:
        device = (
            f"{NO_DEVICE if self.device_id is None else self.device_id} " if self.has_device else ""
        )
        state = "start" if self.is_syncing else "end"
        return f"{self.instance_name} {self.user_id} {device}{state} {self.last_sync_ms}"

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the part after the name.

        A device id may contain spaces: it is the text between the user and the state.
        """
        instance_name, user_id, rest = split(text, 3)
        *device, state, last_sync_ms = rest.rsplit(" ", 2) if " " in rest else ("", rest)
        if state not in {"start", "end"}:
            raise ProtocolError(f"neither start nor end: {state[:SHOWN_MAX]!r}")
        device_id = None if not device or device[0] == NO_DEVICE else device[0]
        return cls(
            instance_name,
            user_id,
            device_id,
            state == "start",
            integer(last_sync_ms),
            bool(device),
        )


@dataclass(frozen=True, slots=True)
class ClearUserSync(Command):
    """Nobody syncs on that worker any more: it shuts down."""

    NAME: ClassVar[str] = "CLEAR_USER_SYNC"
    instance_name: Word


@dataclass(frozen=True, slots=True)
class FederationAck(Command):
    """A worker that sends to other servers has processed everything up to ``token``."""

    NAME: ClassVar[str] = "FEDERATION_ACK"
    instance_name: Word
    token: Token


@dataclass(frozen=True, slots=True)
class RemoteServerUp(Command):
    """Another homeserver may be reachable again: retry it at once."""

    NAME: ClassVar[str] = "REMOTE_SERVER_UP"
    server_name: Word


@dataclass(frozen=True, slots=True)
class UserIp(Command):
    """A client was seen: its address, user agent, and time (ms)."""

    NAME: ClassVar[str] = "USER_IP"
    user_id: Word
    access_token: str = field(repr=False)
    ip: str
    user_agent: str
    device_id: str | None
    last_seen_ms: int
    text: str | None = field(default=None, compare=False, repr=False)
    """The JSON part as received."""

    def arguments(self) -> str:
        values = [self.access_token, self.ip, self.user_agent, self.device_id, self.last_seen_ms]
        return f"{self.user_id} {dump_json(values) if self.text is None else self.text}"

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the part after the name."""
        user_id, rest = split(text, 2)
        match load_json(rest):
            case [
                str(access_token),
                str(ip),
                str(user_agent),
                (str() | None) as device_id,
                int(last_seen_ms),
            ]:
                return cls(user_id, access_token, ip, user_agent, device_id, last_seen_ms, rest)
        raise ProtocolError("not [access token, ip, user agent, device, time]")


@dataclass(frozen=True, slots=True)
class LockReleased(Command):
    """A worker has released a lock; waiters may try."""

    NAME: ClassVar[str] = "LOCK_RELEASED"
    instance_name: str
    lock_name: str
    lock_key: str
    text: str | None = field(default=None, compare=False, repr=False)
    """The JSON part as received."""

    def arguments(self) -> str:
        return (
            dump_json([self.instance_name, self.lock_name, self.lock_key])
            if self.text is None
            else self.text
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the part after the name."""
        match load_json(text):
            case [str(instance_name), str(lock_name), str(lock_key)]:
                return cls(instance_name, lock_name, lock_key, text)
        raise ProtocolError("not [worker, lock name, lock key]")


@dataclass(frozen=True, slots=True)
class NewActiveTask(Command):
    """A background task is ready to be run."""

    NAME: ClassVar[str] = "NEW_ACTIVE_TASK"
    task_id: Text


@dataclass(frozen=True, slots=True)
class CancelTask(Command):
    """A background task is no longer wanted."""

    NAME: ClassVar[str] = "CANCEL_TASK"
    task_id: Text


Side = Literal["server", "client"]

_EITHER: Final = (Error, Ping, RemoteServerUp, LockReleased, NewActiveTask, CancelTask)
SENT_BY: Final[Mapping[Side, frozenset[type[Command]]]] = {
    "server": frozenset((ServerCommand, Rdata, Position, *_EITHER)),
    "client": frozenset(
        (Name, Replicate, UserSync, ClearUserSync, FederationAck, UserIp, *_EITHER)
    ),
}
"""The commands that each side of a TCP connection may send."""

COMMANDS: Final = tuple(sorted(SENT_BY["server"] | SENT_BY["client"], key=lambda kind: kind.NAME))
_READ: Final[Mapping[str, Callable[[str], Command]]] = {kind.NAME: kind.read for kind in COMMANDS}


def parse(line: str) -> Command:
    """Parse a line into a command; a line break at its end is ignored.

    Raise `ProtocolError` with the reason: an unknown command, a missing or malformed argument, a
    line that is blank or too long.
    """
    line = line.rstrip("\r\n")
    if "\n" in line:
        raise ProtocolError("more than one line", line=line[:SHOWN_MAX])
    if len(line) > LINE_BYTES_MAX or (
        len(line) * 4 > LINE_BYTES_MAX and len(line.encode(errors="replace")) > LINE_BYTES_MAX
    ):
        raise ProtocolError(f"a line of more than {LINE_BYTES_MAX} bytes", line=line[:SHOWN_MAX])
    name, _, rest = line.partition(" ")
    read = _READ.get(name)
    if read is None:
        raise ProtocolError(
            "unknown command" if line.strip() else "a blank line", line=line[:SHOWN_MAX]
        )
    try:
        return read(rest)
    except ProtocolError as error:
        raise ProtocolError(f"{name}: {error.reason}", line=line[:SHOWN_MAX]) from None


def is_command(line: str) -> bool:
    """Return whether the line's command is known, well formed or not."""
    return line.partition(" ")[0] in _READ


def encode(command: Command) -> bytes:
    """Return the line for the wire, with its line feed.

    Raise `ProtocolError` if it is too long, or contains what UTF-8 cannot encode.
    """
    try:
        line = str(command).encode()
    except UnicodeEncodeError:
        raise ProtocolError(f"{command.NAME}: half a surrogate pair") from None
    if len(line) > LINE_BYTES_MAX:
        raise ProtocolError(f"{command.NAME}: a line of more than {LINE_BYTES_MAX} bytes")
    return line + b"\n"
