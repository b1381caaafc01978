"""The pages by their paths: one file each, with the reads that feed it."""

from collections.abc import Mapping
from typing import Final

from storage.inspector.pages import event, operations, room
from storage.inspector.visit import Page

PAGES: Final[Mapping[str, Page]] = {
    "/": room.rooms_page,
    "/search": event.search_page,
    "/room": room.room_page,
    "/room/rows": room.rows,
    "/room/changes": room.changes,
    "/room/gaps": room.gaps,
    "/room/growth": room.weeks,
    "/room/outliers": room.outliers_page,
    "/event": event.event_page,
    "/event/raw": event.raw,
    "/why": event.why_page,
    "/state": room.state_page,
    "/resolution": room.resolution_page,
    "/user": event.user_page,
    "/growth": operations.growth_page,
    "/streams": operations.streams_page,
    "/operations": operations.operations_page,
    "/explain": operations.explain_page,
}
