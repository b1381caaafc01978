"""Streams: append-only logs of facts.

The id generator, positions, and the tokens that carry positions to clients.
"""

from storage.streams.id_generator import IdGenerator, Reservation
from storage.streams.positions import VectorPosition
from storage.streams.tokens import PaginationToken, RoomsToken, SyncToken

__all__ = [
    "IdGenerator",
    "PaginationToken",
    "Reservation",
    "RoomsToken",
    "SyncToken",
    "VectorPosition",
]
