"""A drawing surface for the pictures: boxes, arrows and text on a light card.

The card is light in both colour schemes of the site, because an image does not know the scheme.
Coordinates are pixels, from the top left corner.
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Final, NamedTuple

import drawsvg

INK: Final = "#1f2d3a"
MUTED: Final = "#51616f"
PAPER: Final = "#ffffff"
SANS: Final = "Helvetica, Arial, sans-serif"
MONO: Final = "Menlo, Consolas, monospace"
LINE_HEIGHT: Final = 17


class Tone(NamedTuple):
    """A pair of colours: fill and stroke. The text on it is `INK`."""

    fill: str
    stroke: str


GREY: Final = Tone("#f2f4f6", "#93a1ad")
TEAL: Final = Tone("#dff3ef", "#178270")
BLUE: Final = Tone("#e1ecfa", "#2f6db5")
AMBER: Final = Tone("#fdf0d5", "#b87a14")
RED: Final = Tone("#fbe3e0", "#b9463b")
VIOLET: Final = Tone("#ece5f8", "#6f4fb0")


class Box(NamedTuple):
    """A rectangle that was drawn; arrows begin and end at its sides."""

    x: float
    y: float
    width: float
    height: float

    @property
    def top(self) -> tuple[float, float]:
        """Return the middle of the upper side."""
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> tuple[float, float]:
        """Return the middle of the lower side."""
        return self.x + self.width / 2, self.y + self.height

    @property
    def left(self) -> tuple[float, float]:
        """Return the middle of the left side."""
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        """Return the middle of the right side."""
        return self.x + self.width, self.y + self.height / 2


class Canvas:
    """One picture. ``title`` is its text for readers who cannot see it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.title = title
        self._drawing = drawsvg.Drawing(width, height)
        self._drawing.append_title(title)
        self._drawing.append(
            drawsvg.Rectangle(0.5, 0.5, width - 1, height - 1, rx=8, fill=PAPER, stroke="#d5dce2")
        )
        self._columns = width // 7
        self._heads: dict[str, drawsvg.Marker] = {}

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 14,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        fill: str = INK,
    ) -> None:
        """Write one line; ``y`` is its baseline."""
        self._drawing.append(
            drawsvg.Text(
                text,
                size,
                x,
                y,
                fill=fill,
                text_anchor=anchor,
                font_family=MONO if mono else SANS,
                font_weight="bold" if bold else "normal",
            )
        )

    def box(  # noqa: PLR0917  # a rectangle
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        title: str = "",
        lines: Sequence[str] = (),
        *,
        tone: Tone = GREY,
        mono: bool = False,
    ) -> Box:
        """Draw a box with a bold title and lines below it, centred."""
        self._drawing.append(
            drawsvg.Rectangle(
                x, y, width, height, rx=6, fill=tone.fill, stroke=tone.stroke, stroke_width=1.5
            )
        )
        rows = ([title] if title else []) + list(lines)
        first = y + height / 2 - (len(rows) - 1) * LINE_HEIGHT / 2 + 5
        for number, row in enumerate(rows):
            head = bool(title) and number == 0
            self.text(
                x + width / 2,
                first + number * LINE_HEIGHT,
                row,
                anchor="middle",
                bold=head,
                mono=mono,
                size=14 if head else 12.5,
                fill=INK if head else MUTED,
            )
        return Box(x, y, width, height)

    def frame(  # noqa: PLR0917  # a rectangle
        self, x: float, y: float, width: float, height: float, title: str, tone: Tone
    ) -> Box:
        """Draw a frame around a group of things, with its title at the upper left."""
        self._drawing.append(
            drawsvg.Rectangle(
                x,
                y,
                width,
                height,
                rx=8,
                fill="none",
                stroke=tone.stroke,
                stroke_width=1.5,
                stroke_dasharray="5 4",
            )
        )
        self.text(x + 10, y + 20, title, bold=True, fill=tone.stroke)
        return Box(x, y, width, height)

    def line(
        self,
        *points: tuple[float, float],
        colour: str = MUTED,
        dashed: bool = False,
        width: float = 1.5,
    ) -> None:
        """Draw a line through the points."""
        self._path(points, colour, dashed=dashed, width=width)

    def arrow(
        self, *points: tuple[float, float], colour: str = MUTED, dashed: bool = False
    ) -> None:
        """Draw a line through the points, with a head at the last one."""
        self._path(points, colour, dashed=dashed, width=1.5, marker_end=self._head(colour))

    def caption(self, y: float, *sentences: str) -> None:
        """Write sentences below the picture, wrapped; ``y`` is the baseline of the first line."""
        lines = (line for one in sentences for line in wrap(one, self._columns))
        for number, line in enumerate(lines):
            self.text(20, y + 20 * number, line, size=13, fill=MUTED)

    def dot(self, x: float, y: float, tone: Tone, radius: float = 6) -> None:
        """Draw a dot."""
        self._drawing.append(
            drawsvg.Circle(x, y, radius, fill=tone.fill, stroke=tone.stroke, stroke_width=2)
        )

    def bar(self, x: float, y: float, width: float, height: float, tone: Tone) -> None:
        """Draw a bar without text."""
        self._drawing.append(
            drawsvg.Rectangle(x, y, width, height, rx=3, fill=tone.fill, stroke=tone.stroke)
        )

    def svg(self) -> str:
        """Return the picture as SVG, the same text for the same picture."""
        return str(self._drawing.as_svg()) + "\n"

    def save(self, path: Path) -> None:
        """Write the picture."""
        path.write_text(self.svg(), "utf-8")

    def _path(
        self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool, **more: object
    ) -> None:
        width = more.pop("width", 1.5)
        path = drawsvg.Path(
            stroke=colour,
            stroke_width=width,
            fill="none",
            stroke_dasharray="5 4" if dashed else "none",
            **more,
        )
        path.M(*points[0])
        for point in points[1:]:
            path.L(*point)
        self._drawing.append(path)

    def _head(self, colour: str) -> drawsvg.Marker:
        """Return the arrow head of a colour."""
        if colour not in self._heads:
            marker = drawsvg.Marker(-0.2, -0.6, 1, 0.6, scale=8, orient="auto")
            marker.append(drawsvg.Lines(0, 0.5, 0, -0.5, 1, 0, fill=colour, close=True))
            self._heads[colour] = marker
        return self._heads[colour]
