"""What is said of a stream: an `Advance` as RDATA and POSITION, and the positions that answer a REPLICATE. Pure."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Protocol

from storage.replication.commands import LINE_BYTES_MAX, Command, Position, Rdata
from storage.streams.feed import Advance, Fact


class HasPositions(Protocol):
    """A stream, as far as it concerns us here."""

    def positions(self) -> Mapping[str, int]:
        """How far each writer is."""


def advance_commands(advance: Advance) -> Iterator[Command]:
    """The commands that tell of an advance.

    One RDATA per fact; where several share a stream id all but the last are told as "batch". Where
    the position is beyond the last fact, or there are no facts, a POSITION says so. A fact that
    does not fit a line is not told: a POSITION from its own id makes the readers see a hole, and
    fetch it from the table.
    """
    stream_name, instance_name, told = advance.stream_name, advance.instance_name, advance.previous
    for stream_id, facts in groupby(advance.facts, _stream_id):
        if not told < stream_id <= advance.current:
            continue
        rows = list(facts)
        commands: list[Command] = [
            Rdata(stream_name, instance_name, None, fact.row) for fact in rows[:-1]
        ]
        commands.append(Rdata(stream_name, instance_name, stream_id, rows[-1].row))
        if all(_fits(command) for command in commands):
            yield from commands
        else:
            yield Position(stream_name, instance_name, stream_id, stream_id)
        told = stream_id
    if told < advance.current:
        yield Position(stream_name, instance_name, told, advance.current)


def positions(
    streams: Mapping[str, HasPositions], instance_name: str | None = None
) -> Iterator[Position]:
    """A POSITION for each writer of each stream; only for the one writer, if that is given."""
    for name, stream in streams.items():
        for writer, position in sorted(stream.positions().items()):
            if instance_name in {None, writer}:
                yield Position(name, writer, position, position)


def _stream_id(fact: Fact) -> int:
    return fact.stream_id


def _fits(command: Command) -> bool:
    return len(str(command)) <= LINE_BYTES_MAX  # JSON is in ASCII, names are short
