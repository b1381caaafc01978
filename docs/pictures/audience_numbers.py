"""Audience numbers on the main line and a fork, and the ranges of two users."""

from typing import Final, NamedTuple

from docs.pictures.canvas import AMBER, BLUE, MUTED, TEAL, VIOLET, Canvas, Tone
from storage.visibility import multirange
from storage.visibility.multirange import FIRST, AudienceNumber, branching, following


class Numbers(NamedTuple):
    """The numbers of the example: three on the main line, two on a fork from the second."""

    main: tuple[int, int, int]
    fork: tuple[AudienceNumber, AudienceNumber]


def numbers() -> Numbers:
    """Return them as the engine chooses them."""
    second = _given(following(FIRST))
    third = _given(following(second.number))
    left = _given(branching(second.number, 0))
    return Numbers((FIRST, second.number, third.number), (left, _given(following(left.number))))


def _given(number: AudienceNumber | None) -> AudienceNumber:
    assert number is not None, "the lines of the example have room"  # noqa: S101
    return number


AT: Final = (90, 250, 620)
FORK: Final = (350, 470)


def draw() -> Canvas:
    """Return the line of numbers, the fork above it, and a bar for the ranges of each user."""
    chosen = numbers()
    canvas = Canvas(760, 400, "Audience numbers of a room with a fork, and the ranges of two users")
    canvas.line((40, 150), (720, 150), width=2.5)
    canvas.text(20, 136, "main line", size=12.5, fill=MUTED)
    for x, number, label in zip(
        AT, chosen.main, ("Alice creates the room", "Bob joins", "Bob leaves"), strict=True
    ):
        _number(canvas, x, 150, number, label, TEAL, below=True)
    canvas.line((AT[1], 150), (FORK[0], 80), (560, 80), dashed=True)
    for x, entry, label in zip(
        FORK, chosen.fork, ("the same audience", "Carol joins"), strict=True
    ):
        _number(canvas, x, 80, entry.number, label, VIOLET, below=False)
    canvas.text(570, 84, "a fork", size=12.5, fill=MUTED)
    canvas.text(20, 250, "Ranges of", bold=True)
    canvas.text(20, 285, "Bob", size=14)
    canvas.bar(AT[1], 272, AT[2] - AT[1], 18, BLUE)
    canvas.text(
        (AT[1] + AT[2]) / 2,
        286,
        "from his join to his leave, the fork within",
        size=12,
        anchor="middle",
    )
    canvas.text(20, 321, "Carol", size=14)
    canvas.bar(FORK[1], 308, 90, 18, AMBER)
    canvas.text(FORK[1] - 8, 321, "from her join to the end of the fork", size=12, anchor="end")
    for x in (AT[1], FORK[1], 560, AT[2]):
        canvas.line((x, 190), (x, 330), dashed=True, colour="#c3ccd4", width=1)
    canvas.caption(
        362, "An event carries one number. A user sees it if a range of the user contains it."
    )
    canvas.caption(
        382, "A fork's numbers lie between those of the main line, so Bob needs no row for it."
    )
    return canvas


def _number(  # noqa: PLR0917  # a point with its text
    canvas: Canvas, x: float, y: float, number: int, label: str, tone: Tone, *, below: bool
) -> None:
    canvas.dot(x, y, tone, 7)
    canvas.text(x, y + (24 if below else -30), written(number), anchor="middle", mono=True, size=13)
    canvas.text(x, y + (42 if below else -14), label, anchor="middle", size=12.5, fill=MUTED)


def written(number: int) -> str:
    """Return a number as its parts: main, branch, step."""
    unit, step = multirange.UNIT[:2]
    length = multirange.LINE[1]
    assert length is not None  # noqa: S101
    main, rest = divmod(number, unit)
    branch, rest = divmod(rest, length)
    return str(main) if not branch else f"{main} · {branch} · {rest // step}"
