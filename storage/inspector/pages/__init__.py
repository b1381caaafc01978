"""The pages by their paths: one file each, with the reads that feed it."""

from collections.abc import Mapping
from typing import Final

from storage.inspector.pages import (
    event,
    explain,
    growth,
    operations,
    resolution,
    room,
    room_parts,
    rooms,
    search,
    state,
    streams,
    user,
    why,
)
from storage.inspector.visit import Page

PAGES: Final[Mapping[str, Page]] = {
    "/": rooms.page,
    "/search": search.page,
    "/room": room.page,
    "/room/rows": room.rows,
    "/room/changes": room_parts.changes,
    "/room/gaps": room_parts.gaps,
    "/room/growth": room_parts.weeks,
    "/room/outliers": room_parts.outliers_page,
    "/event": event.page,
    "/event/raw": event.raw,
    "/why": why.page,
    "/state": state.page,
    "/resolution": resolution.page,
    "/user": user.page,
    "/growth": growth.page,
    "/streams": streams.page,
    "/operations": operations.page,
    "/explain": explain.page,
}
