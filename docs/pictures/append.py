"""The path of one append, and how group commit overlaps plans and writes."""

from typing import Final

from docs.pictures.canvas import AMBER, BLUE, MUTED, TEAL, VIOLET, Canvas

BATCHES: Final = (("A", TEAL), ("B", BLUE), ("C", VIOLET))


def draw() -> Canvas:
    """Return the stages of persist/ above, and three batches in time below."""
    canvas = Canvas(760, 470, "One append: receive, plan, load, write, commit; batches overlap")
    _stages(canvas)
    _pipeline(canvas)
    return canvas


def _stages(canvas: Canvas) -> None:
    receive = canvas.box(
        20, 60, 140, 74, "receive", ["parse, check, hash,", "verify, sort"], tone=TEAL
    )
    queue = canvas.box(200, 60, 110, 74, "queue", ["appends of", "all callers"])
    plan = canvas.box(
        350, 60, 150, 74, "plan", ["order, auth, state,", "audience: no I/O"], tone=BLUE
    )
    write = canvas.box(
        560, 60, 180, 74, "write", ["one statement, compares", "rooms.write_version"], tone=AMBER
    )
    canvas.box(350, 180, 150, 56, "load", ["one statement, or none"], tone=AMBER)
    canvas.box(560, 180, 180, 56, "publish", ["wake readers, return results"], tone=TEAL)
    canvas.text(20, 38, "PDUs (bytes)", bold=True)
    canvas.arrow((90, 42), (90, 54))
    canvas.arrow(receive.right, (192, 97))
    canvas.arrow(queue.right, (342, 97))
    canvas.arrow(plan.right, (552, 97))
    canvas.text(526, 90, "rows", size=12, anchor="middle", fill=MUTED)
    canvas.arrow((400, 134), (400, 172))
    canvas.arrow((450, 180), (450, 142))
    canvas.text(392, 158, "missing data", size=12, anchor="end", fill=MUTED)
    canvas.arrow(write.bottom, (650, 172))
    canvas.text(658, 158, "committed", size=12, fill=MUTED)
    canvas.arrow((560, 120), (530, 120), (530, 46), (425, 46), (425, 54), colour="#b9463b")
    canvas.text(
        480, 38, "room changed meanwhile: plan again", size=12, anchor="middle", fill="#b9463b"
    )
    canvas.arrow((650, 236), (650, 256), (90, 256), (90, 142), dashed=True)
    canvas.text(100, 248, "an AppendResult for each PDU", size=12, fill=MUTED)


def _pipeline(canvas: Canvas) -> None:
    canvas.text(20, 300, "Group commit: while one batch is written, the next is planned", bold=True)
    for row, label in ((322, "plan (Python)"), (372, "write (Postgres)")):
        canvas.text(20, row + 24, label, size=13, fill=MUTED)
    for number, (name, tone) in enumerate(BATCHES):
        canvas.box(150 + number * 150, 322, 120, 36, tone=tone, lines=[f"batch {name}"])
        canvas.box(280 + number * 150, 372, 140, 36, tone=tone, lines=[f"batch {name}"])
    canvas.arrow((150, 428), (732, 428))
    canvas.text(740, 446, "time", size=12, anchor="end", fill=MUTED)
    canvas.text(
        20,
        456,
        "B is planned as if A had committed. If A fails, B is planned again.",
        size=13,
        fill=MUTED,
    )
