"""The page of the statistics: tables and plots in one file of HTML that is also well-formed XML.

The page loads nothing from elsewhere. Users choose the names of rooms and types: every text goes
through `text`, and plots have only our own words. Bars for rooms or types are numbered as the rows
of the table next to them.
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from datetime import date
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from storage.pipeline.stats.aggregate import Row, Statistics

LENGTH_MAX: Final = 120
NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
PLOT: Final[Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "svg.hashsalt": "room-storage",
    "text.parse_math": False,
}
ROOM_COLUMNS: Final = (
    "name",
    "room_id",
    "room_version",
    "events",
    "bytes",
    "state_entries",
    "joined",
    "merges",
    "forward_extremities",
)
STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: left;
  overflow-wrap: anywhere; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
img { max-width: 100%; }
"""


def page(found: "Statistics") -> str:
    dated = [row for row in found.months if row["month"] is not None]
    parts = [
        _section("In all", _values(found.totals)),
        _section(
            "Growth by month", _growth(dated, "month"), _table(("month", *GROWN), found.months)
        ),
        _section(
            f"The last {len(found.days)} days with events",
            _growth(found.days, "day"),
            _table(("day", *GROWN), found.days),
        ),
        _section(
            "Events per type",
            _bars(found.types, "events"),
            _table(("type", "events", "state_events", "bytes"), found.types),
        ),
        _section(
            "Largest rooms",
            _bars(found.largest_rooms, "events"),
            _table(ROOM_COLUMNS, found.largest_rooms),
        ),
        _section(
            "Largest states",
            _bars(found.largest_states, "state_entries"),
            _table(ROOM_COLUMNS, found.largest_states),
        ),
        _section(
            "Most forked rooms",
            "<p>Merges are events with more than one parent."
            " Forward extremities are the events without children now.</p>",
            _bars(found.most_forked, "merges"),
            _table(ROOM_COLUMNS, found.most_forked),
        ),
    ]
    head = (
        f'<meta charset="utf-8"/><title>Statistics of a room storage</title><style>{STYLE}</style>'
    )
    body = f"<body><h1>Statistics of a room storage</h1>{''.join(parts)}</body>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>{body}</html>\n'


GROWN: Final = ("sent_events", "sent_bytes", "received_events", "received_bytes")


def text(value: object) -> str:
    """Return a value for the page: shortened, escaped, and without characters that XML forbids."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    shown = NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", str(value))
    return html.escape(shown if len(shown) <= LENGTH_MAX else shown[: LENGTH_MAX - 1] + "…")


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{text(title)}</h2>{''.join(parts)}</section>"


def _values(values: Mapping[str, int]) -> str:
    return (
        "<table>"
        + "".join(
            f"<tr><th>{text(_words(name))}</th>{_cell(value)}</tr>"
            for name, value in values.items()
        )
        + "</table>"
    )


def _table(columns: Sequence[str], rows: Sequence["Row"]) -> str:
    head = "".join(f"<th>{text(_words(name))}</th>" for name in ("", *columns))
    body = [
        f"<tr>{_cell(number)}{''.join(_cell(row[name]) for name in columns)}</tr>"
        for number, row in enumerate(rows, 1)
    ]
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def _cell(value: object) -> str:
    return (
        f'<td class="number">{text(value)}</td>'
        if isinstance(value, int)
        else f"<td>{text(value)}</td>"
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


# ------------------------------------------------------------------------------------------------
# plots


def _growth(rows: Sequence["Row"], unit: str) -> str:
    """Draw events sent in each month or day, and the running total of those received."""
    if not rows:
        return ""
    days = [date.fromisoformat(row[unit]) for row in rows]
    received = list(accumulate(row["received_events"] for row in rows))
    with mpl.rc_context(PLOT):
        figure, (sent, total) = _plots(2)
        sent.bar(
            _at(days), [row["sent_events"] for row in rows], width=25 if unit == "month" else 0.8
        )
        sent.set_title(f"Events sent, by {unit}")
        total.step(_at(days), received, where="post", marker=".")
        total.set_title(
            "Events received, added up"
            if unit == "month"
            else "Events received in these days, added up"
        )
        for one in (sent, total):
            one.xaxis_date()
            one.set_ylim(bottom=0)
        figure.autofmt_xdate()
        return _image(figure, f"Events sent and received by {unit}")


def _at(days: Sequence[date]) -> list[float]:
    """Return days as matplotlib counts them: since 1970."""
    return [float((day - date(1970, 1, 1)).days) for day in days]


def _bars(rows: Sequence["Row"], name: str) -> str:
    if not rows:
        return ""
    with mpl.rc_context(PLOT):
        figure, (bars,) = _plots(1)
        numbers = list(range(1, len(rows) + 1))
        bars.barh(numbers, [row[name] for row in rows])
        bars.set_yticks(numbers)
        bars.invert_yaxis()
        bars.set_title(f"{_words(name).capitalize()}, numbered as in the table")
        return _image(figure, f"{_words(name).capitalize()} of the rows below")


def _plots(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9, 3), layout="tight")
    return figure, [figure.add_subplot(1, count, at + 1) for at in range(count)]


def _image(figure: Figure, alt: str) -> str:
    """Return the plot as an image in the page: its ids are separate, and no script would run."""
    drawn = BytesIO()
    figure.savefig(
        drawn, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None}
    )
    _, begin, rest = drawn.getvalue().partition(b"<svg")  # the address of a DTD precedes it
    data = base64.b64encode(begin + rest).decode()
    return f'<p><img alt="{text(alt)}" src="data:image/svg+xml;base64,{data}"/></p>'
