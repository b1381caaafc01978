"""Vector and linear position of a stream with two writers."""

from typing import Final

from docs.pictures.canvas import AMBER, BLUE, GREY, MUTED, TEAL, Canvas
from storage.streams.positions import VectorPosition

IDS: Final = {"main": (51, 53, 54, 57, 60), "w2": (52, 55, 56, 58, 59)}
IN_FLIGHT: Final = {"w2": 56}
"""The first id of this writer that is not committed yet."""


def position() -> VectorPosition:
    """Return the position after what is committed: each writer up to its last finished id."""
    upto = {
        writer: max(one for one in ids if one < IN_FLIGHT.get(writer, 100))
        for writer, ids in IDS.items()
    }
    return VectorPosition.of(min(upto.values()), upto)


def draw() -> Canvas:
    """Return a line for each writer with its ids, and the two positions."""
    vector = position()
    canvas = Canvas(760, 330, "A stream with two writers: vector position and linear position")
    for row, (writer, ids) in enumerate(IDS.items()):
        y = 60 + row * 80
        canvas.text(20, y + 5, f"writer {writer}", bold=True)
        canvas.line((130, y), (730, y), colour="#93a1ad", width=2)
        for one in ids:
            done = one < IN_FLIGHT.get(writer, 100)
            canvas.dot(_x(one), y, (TEAL if vector.covers(writer, one) else GREY), 15)
            canvas.text(_x(one), y + 5, str(one), anchor="middle", size=13, bold=done)
        x = _x(vector.position(writer)) + 24
        canvas.line((x, y - 30), (x, y + 30), colour=BLUE.stroke, width=3)
    canvas.text(_x(56), 178, "in flight", anchor="middle", size=12, fill=MUTED)
    canvas.text(
        _x(58) + 28, 178, "committed, not covered yet", anchor="middle", size=12, fill=MUTED
    )
    canvas.line((_x(55) + 14, 20), (_x(55) + 14, 200), colour=AMBER.stroke, dashed=True, width=2)
    items = "".join(f", {writer} {upto}" for writer, upto in vector.items)
    canvas.text(20, 232, f"vector position: min {vector.min}{items}", mono=True, fill=BLUE.stroke)
    canvas.text(20, 256, f"linear position: {vector.linear()}", mono=True, fill=AMBER.stroke)
    canvas.caption(
        288,
        "A reader at the vector position has the green facts. While 56 is in flight, 58 waits.",
        "A linear position covers the facts of all writers up to it.",
    )
    return canvas


def _x(stream_id: int) -> float:
    return 160 + (stream_id - 51) * 60
