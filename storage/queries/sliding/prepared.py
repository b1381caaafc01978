"""A request with a parsed `pos` and checked arguments."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from storage import arguments as args
from storage.config import Config
from storage.errors import InputError, InvalidToken, UnknownPos
from storage.ids import UserId
from storage.queries.sliding.checks import NAME_BYTES_MAX
from storage.queries.sliding.connection import ConnectionKey
from storage.queries.sliding.types import SlidingSyncRequest
from storage.queries.sync.positions import BESIDE, covered
from storage.streams import SyncToken, VectorPosition
from storage.streams.tokens import PosToken, is_foreign_pos


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request of a device. ``pos`` None: it begins a connection."""

    key: ConnectionKey
    body: SlidingSyncRequest
    pos: PosToken | None
    ignored: Collection[UserId] | None
    """None, until the account data are read: the users that these list."""
    deployment: str
    defined: frozenset[str]
    rows_max: int
    timeline_max: int

    @classmethod
    def of(
        cls,
        user_id: str,
        body: SlidingSyncRequest,
        *,
        device_id: str,
        pos: str | None,
        ignored: list[UserId] | None,
        server_name: str,
        deployment: str,
        config: Config,
        defined: frozenset[str],
    ) -> "PreparedRequest":
        """Return the request for these arguments.

        `InvalidIdentifier`, `InvalidToken`, `UnknownPos`, `InputError`.
        """
        user = args.local_user(user_id, server_name)
        if not 1 <= len(args.text(device_id).encode()) <= NAME_BYTES_MAX:
            raise InputError(f"device_id has 1 to {NAME_BYTES_MAX} bytes, not {device_id[:99]!r}")
        args.instance(body, SlidingSyncRequest, "request")
        return cls(
            ConnectionKey(user, device_id, body.conn_id),
            body,
            None if pos is None else _read(pos, deployment),
            ignored,
            deployment,
            defined,
            config.traversal_rows_max,
            config.page_limit_max,
        )

    def with_ignored(self, listed: Collection[UserId]) -> "PreparedRequest":
        """Return the request with these users of the account data, if it names none itself."""
        return replace(self, ignored=listed) if self.ignored is None else self

    @property
    def user_id(self) -> UserId:
        return self.key.user_id

    @property
    def text(self) -> str:
        """Return the `pos` as the caller gave it: a token has one text only."""
        return "" if self.pos is None else self.pos.print(self.deployment)

    @property
    def upto(self) -> SyncToken | None:
        """Return the positions of the `pos`."""
        return None if self.pos is None else self.pos.upto

    def covered(self, reached: SyncToken) -> SyncToken:
        """Return the part of these positions that a response of this process covers."""
        return covered(reached, self.defined, self.upto)

    def extension_position(self, stream: str) -> VectorPosition:
        """Return up to where the client has the facts of an extension."""
        if self.pos is None:
            return VectorPosition()
        known = self.pos.extensions.position(stream)
        if known is None:
            known = self.pos.upto.position(stream)
        return VectorPosition() if known is None else known

    @property
    def waited(self) -> tuple[str, ...]:
        """Return the streams beside the events whose facts end the wait."""
        return (*(one for one in BESIDE if one in self.body.extensions), *sorted(self.defined))


def _read(pos: str, deployment: str) -> PosToken:
    """Return a `pos`. `UnknownPos` for one of another database: its connections are not here."""
    try:
        return PosToken.parse(pos, deployment)
    except InvalidToken as error:
        if is_foreign_pos(error.token, deployment):
            raise UnknownPos(pos, error.reason) from error
        raise
