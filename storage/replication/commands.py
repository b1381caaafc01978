"""The commands of the replication protocol, one line each: `parse(line)` gives a command, `str(command)` the line again.

Pure; the source is the replication document and the forms that workers in the field send and understand:

    SERVER <server_name>                                      RDATA <stream> <writer> <token or "batch"> <row as JSON>
    NAME <name for people>                                    POSITION <stream> <writer> <previous token> <new token>
    PING <anything>                                           USER_SYNC <worker> <user> <device or "None"> <start|end> <last_sync_ms>
    ERROR <reason>                                            CLEAR_USER_SYNC <worker>
    REPLICATE                                                 FEDERATION_ACK <worker> <token>
    REMOTE_SERVER_UP <server_name>                            LOCK_RELEASED [<worker>, <lock name>, <lock key>]
    NEW_ACTIVE_TASK <task>   CANCEL_TASK <task>               USER_IP <user> [<access token>, <ip>, <user agent>, <device>, <last_seen_ms>]

Two forms of USER_SYNC are in use: workers before early 2024 leave the device out. Which one a line had is kept (`has_device`).
JSON is written without spaces and in ASCII, as those workers do, and a line that was read is written as it came.

A command that exists can be sent: its constructor refuses (ProtocolError) what would not come back from its line. Only the
length is the line's own affair: at most LINE_BYTES_MAX, without the line feed.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal, Self

import orjson

from storage.errors import ProtocolError

LINE_BYTES_MAX: Final = 16_384
BATCH: Final = "batch"
NO_DEVICE: Final = "None"
LARGEST_TOKEN: Final = 2**63 - 1

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,18}")
_SPACE: Final = re.compile(r"[ \r\n]")
_LINE_BREAK: Final = re.compile(r"[\r\n]")
_SHOWN_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Command:
    """One line. The subclasses are all there are."""

    NAME: ClassVar[str]

    def arguments(self) -> str:
        """What follows the name; empty for nothing."""
        return ""

    def __str__(self) -> str:
        arguments = self.arguments()
        return f"{self.NAME} {arguments}" if arguments else self.NAME


@dataclass(frozen=True, slots=True)
class ServerCommand(Command):
    """Sent at the start by the server: which homeserver the client is talking to."""

    NAME: ClassVar[str] = "SERVER"
    server_name: str

    def __post_init__(self) -> None:
        _word(self.server_name, "server name")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return self.server_name

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        return cls(text)


@dataclass(frozen=True, slots=True)
class Rdata(Command):
    """One row of a stream.

    ``token`` None: more rows with the same token follow, the last of which has it ("batch").
    """

    NAME: ClassVar[str] = "RDATA"
    stream_name: str
    instance_name: str
    token: int | None
    row: Any
    text: str | None = field(default=None, compare=False, repr=False)
    """The row as it came over the wire, or as it was written once."""

    def __post_init__(self) -> None:
        _word(self.stream_name, "stream name")
        _word(self.instance_name, "instance name")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        if self.text is None:
            object.__setattr__(self, "text", _dump(self.row))
        return f"{self.stream_name} {self.instance_name} {BATCH if self.token is None else self.token} {self.text}"

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        stream_name, instance_name, token, row = _split(text, 4)
        return cls(
            stream_name, instance_name, None if token == BATCH else _integer(token), _load(row), row
        )


@dataclass(frozen=True, slots=True)
class Position(Command):
    """A writer is at ``new_token``, and has written nothing after ``prev_token``: who is not there yet has missed rows."""

    NAME: ClassVar[str] = "POSITION"
    stream_name: str
    instance_name: str
    prev_token: int
    new_token: int

    def __post_init__(self) -> None:
        _word(self.stream_name, "stream name")
        _word(self.instance_name, "instance name")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return f"{self.stream_name} {self.instance_name} {self.prev_token} {self.new_token}"

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        stream_name, instance_name, prev_token, new_token = _split(text, 4)
        return cls(stream_name, instance_name, _integer(prev_token), _integer(new_token))


@dataclass(frozen=True, slots=True)
class Error(Command):
    """Something went wrong; usually the connection is closed after it."""

    NAME: ClassVar[str] = "ERROR"
    reason: str = ""

    def __post_init__(self) -> None:
        _one_line(self.reason, "reason")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return self.reason

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        return cls(text)

    @classmethod
    def of(cls, reason: str) -> Self:
        """With any text: line breaks become spaces, and what is too long for a line is cut."""
        return cls(_LINE_BREAK.sub(" ", reason)[: LINE_BYTES_MAX // 8])


@dataclass(frozen=True, slots=True)
class Ping(Command):
    """The connection is still alive. ``data`` is usually the time in ms."""

    NAME: ClassVar[str] = "PING"
    data: str = ""

    def __post_init__(self) -> None:
        _one_line(self.data, "data")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return self.data

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        return cls(text)


@dataclass(frozen=True, slots=True)
class Name(Command):
    """Sent at the start by the client: who it is, for people."""

    NAME: ClassVar[str] = "NAME"
    name: str

    def __post_init__(self) -> None:
        _text(self.name, "name")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return self.name

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        return cls(text)


@dataclass(frozen=True, slots=True)
class Replicate(Command):
    """Asks for the current position of all streams, and for what follows."""

    NAME: ClassVar[str] = "REPLICATE"

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        if text.strip():
            raise ProtocolError("REPLICATE takes no arguments")
        return cls()


@dataclass(frozen=True, slots=True)
class UserSync(Command):
    """A user has started or stopped syncing on a worker, with one device (None: not known)."""

    NAME: ClassVar[str] = "USER_SYNC"
    instance_name: str
    user_id: str
    device_id: str | None
    is_syncing: bool
    last_sync_ms: int
    has_device: bool = True
    """Whether the line has a place for the device; older workers have none."""

    def __post_init__(self) -> None:
        _word(self.instance_name, "instance name")
        _word(self.user_id, "user id")
        if self.device_id is not None:
            _one_line(self.device_id, "device id")
        if self.device_id == NO_DEVICE or (self.device_id is not None and not self.has_device):
            raise ProtocolError(
                f"a device id {self.device_id!r} cannot be written in this form of USER_SYNC"
            )

    def arguments(self) -> str:
        """See `Command.arguments`."""
        device = (
            f"{NO_DEVICE if self.device_id is None else self.device_id} " if self.has_device else ""
        )
        return f"{self.instance_name} {self.user_id} {device}{'start' if self.is_syncing else 'end'} {self.last_sync_ms}"

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name.

        A device id may hold spaces: it is what stands between the user and the state.
        """
        instance_name, user_id, rest = _split(text, 3)
        *device, state, last_sync_ms = rest.rsplit(" ", 2) if " " in rest else ("", rest)
        if state not in {"start", "end"}:
            raise ProtocolError(f"neither start nor end: {state[:_SHOWN_MAX]!r}")
        device_id = None if not device or device[0] == NO_DEVICE else device[0]
        return cls(
            instance_name,
            user_id,
            device_id,
            state == "start",
            _integer(last_sync_ms),
            bool(device),
        )


@dataclass(frozen=True, slots=True)
class ClearUserSync(Command):
    """Nobody syncs on that worker any more: it shuts down."""

    NAME: ClassVar[str] = "CLEAR_USER_SYNC"
    instance_name: str

    def __post_init__(self) -> None:
        _word(self.instance_name, "instance name")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return self.instance_name

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        return cls(text)


@dataclass(frozen=True, slots=True)
class FederationAck(Command):
    """A worker that sends to other servers has dealt with everything up to ``token``."""

    NAME: ClassVar[str] = "FEDERATION_ACK"
    instance_name: str
    token: int

    def __post_init__(self) -> None:
        _word(self.instance_name, "instance name")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return f"{self.instance_name} {self.token}"

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        instance_name, token = _split(text, 2)
        return cls(instance_name, _integer(token))


@dataclass(frozen=True, slots=True)
class RemoteServerUp(Command):
    """Another homeserver may have come back: try it again at once."""

    NAME: ClassVar[str] = "REMOTE_SERVER_UP"
    server_name: str

    def __post_init__(self) -> None:
        _word(self.server_name, "server name")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return self.server_name

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        return cls(text)


@dataclass(frozen=True, slots=True)
class UserIp(Command):
    """A client was seen: from where, with what, and when (ms)."""

    NAME: ClassVar[str] = "USER_IP"
    user_id: str
    access_token: str = field(repr=False)
    ip: str
    user_agent: str
    device_id: str | None
    last_seen_ms: int
    text: str | None = field(default=None, compare=False, repr=False)
    """The JSON part as it came."""

    def __post_init__(self) -> None:
        _word(self.user_id, "user id")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        values = [self.access_token, self.ip, self.user_agent, self.device_id, self.last_seen_ms]
        return f"{self.user_id} {_dump(values) if self.text is None else self.text}"

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        user_id, rest = _split(text, 2)
        match _load(rest):
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
    """A worker has let go of a lock; whoever waits for it may try."""

    NAME: ClassVar[str] = "LOCK_RELEASED"
    instance_name: str
    lock_name: str
    lock_key: str
    text: str | None = field(default=None, compare=False, repr=False)
    """The JSON part as it came."""

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return (
            _dump([self.instance_name, self.lock_name, self.lock_key])
            if self.text is None
            else self.text
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        match _load(text):
            case [str(instance_name), str(lock_name), str(lock_key)]:
                return cls(instance_name, lock_name, lock_key, text)
        raise ProtocolError("not [worker, lock name, lock key]")


@dataclass(frozen=True, slots=True)
class NewActiveTask(Command):
    """A background task is ready to be run by whoever runs them."""

    NAME: ClassVar[str] = "NEW_ACTIVE_TASK"
    task_id: str

    def __post_init__(self) -> None:
        _text(self.task_id, "task id")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return self.task_id

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        return cls(text)


@dataclass(frozen=True, slots=True)
class CancelTask(Command):
    """A background task is not wanted any more."""

    NAME: ClassVar[str] = "CANCEL_TASK"
    task_id: str

    def __post_init__(self) -> None:
        _text(self.task_id, "task id")

    def arguments(self) -> str:
        """See `Command.arguments`."""
        return self.task_id

    @classmethod
    def read(cls, text: str) -> Self:
        """From what follows the name."""
        return cls(text)


Side = Literal["server", "client"]

_EITHER: Final = (Error, Ping, RemoteServerUp, LockReleased, NewActiveTask, CancelTask)
SENT_BY: Final[Mapping[Side, frozenset[type[Command]]]] = {
    "server": frozenset((ServerCommand, Rdata, Position, *_EITHER)),
    "client": frozenset(
        (Name, Replicate, UserSync, ClearUserSync, FederationAck, UserIp, *_EITHER)
    ),
}
"""Which side of a TCP connection may send what."""

COMMANDS: Final = tuple(sorted(SENT_BY["server"] | SENT_BY["client"], key=lambda kind: kind.NAME))
_READ: Final[Mapping[str, Callable[[str], Command]]] = {kind.NAME: kind.read for kind in COMMANDS}  # type: ignore[attr-defined]


def parse(line: str) -> Command:
    """The command that a line holds; a line break at its end does not count.

    `ProtocolError` says what is wrong: an unknown command, a missing or malformed argument, a line
    that is blank or too long.
    """
    line = line.rstrip("\r\n")
    if "\n" in line:
        raise ProtocolError("more than one line", line=line[:_SHOWN_MAX])
    if len(line) > LINE_BYTES_MAX or (
        len(line) * 4 > LINE_BYTES_MAX and len(line.encode(errors="replace")) > LINE_BYTES_MAX
    ):
        raise ProtocolError(f"a line of more than {LINE_BYTES_MAX} bytes", line=line[:_SHOWN_MAX])
    name, _, rest = line.partition(" ")
    read = _READ.get(name)
    if read is None:
        raise ProtocolError(
            "unknown command" if line.strip() else "a blank line", line=line[:_SHOWN_MAX]
        )
    try:
        return read(rest)
    except ProtocolError as error:
        raise ProtocolError(f"{name}: {error.reason}", line=line[:_SHOWN_MAX]) from None


def is_known(line: str) -> bool:
    """Whether the line's command is one of ours, well formed or not."""
    return line.partition(" ")[0] in _READ


def encode(command: Command) -> bytes:
    """The line for the wire, with its line feed.

    `ProtocolError` if it is too long, or holds what UTF-8 cannot write.
    """
    try:
        line = str(command).encode()
    except UnicodeEncodeError:
        raise ProtocolError(f"{command.NAME}: half a surrogate pair") from None
    if len(line) > LINE_BYTES_MAX:
        raise ProtocolError(f"{command.NAME}: a line of more than {LINE_BYTES_MAX} bytes")
    return line + b"\n"


# -------------------------------------------------------------------------------------------------------------
# arguments


def _split(text: str, count: int) -> list[str]:
    parts = text.split(" ", count - 1)
    if len(parts) != count:
        raise ProtocolError(f"{len(parts) if text else 0} of {count} arguments")
    return parts


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text) or abs(int(text)) > LARGEST_TOKEN:
        raise ProtocolError(f"not a number: {text[:_SHOWN_MAX]!r}")
    return int(text)


@lru_cache(maxsize=4096)
def _word(text: str, what: str) -> None:
    if not text or _SPACE.search(text):
        raise ProtocolError(f"the {what} {text[:_SHOWN_MAX]!r} is empty or holds a space")


def _text(text: str, what: str) -> None:
    if not text.strip():
        raise ProtocolError(f"the {what} is empty")
    _one_line(text, what)


def _one_line(text: str, what: str) -> None:
    if _LINE_BREAK.search(text):
        raise ProtocolError(f"the {what} holds a line break")


def _load(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"not JSON: {error}") from None


def _dump(value: Any) -> str:
    """JSON without spaces, in ASCII."""
    try:
        text = orjson.dumps(value).decode()
        return (
            text
            if text.isascii() and "\x7f" not in text
            else json.dumps(value, separators=(",", ":"), allow_nan=False)
        )
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"not a JSON value: {error}") from None
