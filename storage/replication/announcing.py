"""The commands for an `Advance` (RDATA and POSITION), and the positions that answer REPLICATE."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Protocol

from storage.replication.commands import LINE_BYTES_MAX, Command, Position, Rdata
from storage.streams.feed import Advance, Fact


class HasPositions(Protocol):
    """The part of a stream that is needed here."""

    def positions(self) -> Mapping[str, int]:
        """Return the position of each writer."""


def advance_commands(advance: Advance, *, batches: bool = True) -> Iterator[Command]:
    """Yield the commands that publish an advance.

    There is one RDATA per fact; where several share a stream id all but the last have the token
    "batch". A POSITION follows where the position is beyond the last fact, or there are no facts. A
    fact that does not fit a line is not sent: a POSITION from its own id makes the readers see a
    hole, and fetch it from the table. Without ``batches``, the same is done for facts that share an
    id.
    """
    stream_name, instance_name, sent = advance.stream_name, advance.instance_name, advance.previous
    for stream_id, facts in groupby(advance.facts, _stream_id):
        if not sent < stream_id <= advance.current:
            continue
        rows = list(facts)
        commands: list[Command] = [
            Rdata(stream_name, instance_name, None, fact.row) for fact in rows[:-1]
        ]
        commands.append(Rdata(stream_name, instance_name, stream_id, rows[-1].row))
        if (batches or len(commands) == 1) and all(_fits(command) for command in commands):
            yield from commands
        else:
            yield Position(stream_name, instance_name, stream_id, stream_id)
        sent = stream_id
    if sent < advance.current:
        yield Position(stream_name, instance_name, sent, advance.current)


def positions(
    streams: Mapping[str, HasPositions], instance_name: str | None = None
) -> Iterator[Position]:
    """Yield a POSITION for each writer of each stream, or for the given writer only."""
    for name, stream in streams.items():
        for writer, position in sorted(stream.positions().items()):
            if instance_name in {None, writer}:
                yield Position(name, writer, position, position)


def _stream_id(fact: Fact) -> int:
    return fact.stream_id


def _fits(command: Command) -> bool:
    return len(str(command)) <= LINE_BYTES_MAX  # JSON is in ASCII, names are short
