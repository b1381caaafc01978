"""The phases of a purge of history, and what each deletes."""

from typing import Final

from docs.pictures.canvas import AMBER, BLUE, MUTED, RED, TEAL, VIOLET, Canvas, Tone

PHASES: Final[tuple[tuple[str, Tone, tuple[str, str], str], ...]] = (
    ("history", TEAL, ("events below the cut,", "batch by batch"), "per batch, for milliseconds"),
    ("deltas", BLUE, ("state deltas", "up to the cut"), "none"),
    ("groups", VIOLET, ("state groups that", "nothing refers to"), "per batch, for milliseconds"),
    ("sweep", AMBER, ("retained events that", "nothing needs"), "per batch, for milliseconds"),
    ("done", TEAL, ("unused visibility,", "caches of others"), "once, at the end"),
)
"""Name (`purge_jobs.phase`), tone, work, and when the room is locked."""


def draw() -> Canvas:
    """Return the phases in order, with the lock of the room below each."""
    canvas = Canvas(760, 330, "The phases of a purge of history")
    canvas.text(
        20,
        34,
        "A job: a row of purge_jobs. Each batch is a transaction that updates it.",
        bold=True,
    )
    for number, (name, tone, work, lock) in enumerate(PHASES):
        x = 20 + number * 148
        canvas.box(x, 56, 128, 84, name, work, tone=tone)
        if number:
            canvas.arrow((x - 20, 98), (x - 7, 98))
        canvas.text(x + 64, 172, "room locked:", size=12, anchor="middle", fill=MUTED)
        first, _, second = lock.partition(", ")
        canvas.text(x + 64, 190, first, size=12.5, anchor="middle", fill=RED.stroke)
        canvas.text(x + 64, 207, second, size=12.5, anchor="middle", fill=RED.stroke)
    canvas.arrow((528, 140), (528, 152), (84, 152), (84, 146), dashed=True)
    canvas.caption(
        244,
        "Dashed: an event was reordered meanwhile, so the job begins again.",
        "Between two transactions the purge pauses. The room is in use as usual.",
        "A killed purge continues from its row; a finished phase costs one query.",
        "Retained events are state events, redactions, and events of local users.",
    )
    return canvas
