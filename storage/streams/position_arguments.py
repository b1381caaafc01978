"""Positions as arguments of reads: a number, or a vector position, which is exact per writer."""

from storage import arguments as args
from storage.streams.positions import VectorPosition


def vector(position: int | VectorPosition, name: str) -> VectorPosition:
    """Return the position as a vector. Raise `InputError` for another value."""
    return (
        position
        if isinstance(position, VectorPosition)
        else VectorPosition(args.position(position, name))
    )


def parts(position: VectorPosition) -> tuple[int, list[str], list[int]]:
    """Return the arguments of a statement: ``min``, and the writers that are further."""
    return (
        position.min,
        [writer for writer, _ in position.items],
        [number for _, number in position.items],
    )
