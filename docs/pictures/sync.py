"""One /sync: the branches with one, two or three statements."""

from docs.pictures.canvas import AMBER, BLUE, GREY, MUTED, TEAL, VIOLET, Canvas


def draw() -> Canvas:
    """Return the branches of a sync, from the token to the response."""
    canvas = Canvas(760, 520, "One sync: at most three statements, whatever the number of rooms")
    token = canvas.box(280, 20, 200, 44, "since token", ["a position for each stream"])
    caches = canvas.box(
        225, 100, 310, 60, "caches: which rooms can have changed?", ["no statement"], tone=GREY
    )
    canvas.arrow(token.bottom, (380, 92))
    none = canvas.box(20, 220, 210, 64, "1  positions", ["next_batch; nothing newer"], tone=TEAL)
    brief = canvas.box(
        275, 220, 210, 64, "1  positions and timelines", ["in one statement"], tone=BLUE
    )
    first = canvas.box(530, 220, 210, 64, "1  positions", ["opens the snapshot"], tone=VIOLET)
    second = canvas.box(
        530, 316, 210, 64, "2  rooms and timelines", ["visible events, by index"], tone=VIOLET
    )
    third = canvas.box(530, 412, 210, 64, "3  states", ["members, summary, invites"], tone=AMBER)
    canvas.box(160, 412, 200, 64, "response", ["and next_batch"], tone=TEAL)
    for target, label, x in (
        (none, "none", 130),
        (brief, "only timelines", 372),
        (first, "any", 640),
    ):
        canvas.arrow(caches.bottom, (target.top[0], 212))
        canvas.text(x, 200, label, size=13, anchor="end" if x < 380 else "start", fill=MUTED)
    canvas.arrow(first.bottom, (635, 308))
    canvas.arrow(second.bottom, (635, 404))
    canvas.text(643, 398, "a state has changed", size=12, fill=MUTED)
    canvas.arrow((530, 348), (300, 348), (300, 404))
    canvas.text(520, 341, "no state has changed", size=12, anchor="end", fill=MUTED)
    canvas.arrow(none.bottom, (125, 444), (152, 444))
    canvas.arrow((340, 284), (340, 404))
    canvas.arrow(third.left, (368, 444))
    canvas.caption(
        504, "Positions commit with their facts, so a snapshot has exactly the facts up to them."
    )
    return canvas
