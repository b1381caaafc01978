"""Show progress on standard error: a bar on a terminal, else a line every ten seconds.

Standard output has only the result. `--quiet` shows nothing. The bar disappears at the end.
"""

import sys
import time
from collections.abc import Callable
from typing import IO, Annotated, Any, Final, Self

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

from storage.observability.progress import Progress

LINE_SECONDS: Final = 10.0
"""Pause between two lines."""

SPEED_SECONDS: Final = 300.0
"""The remaining time is estimated by the speed of the last five minutes."""

BAR_WIDTH: Final = 20

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]


class ProgressDisplay:
    """Shows the latest `Progress` that it is called with, during a `with` block."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        file: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file or sys.stderr
        self._clock = clock
        self._has_lines = not (quiet or self._file.isatty())
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.fields[text]}"),
            console=Console(file=self._file),
            speed_estimate_period=SPEED_SECONDS,
            transient=True,
            disable=quiet or not self._file.isatty(),
            get_time=clock,
        )
        self._phase = ""
        self._task = TaskID(0)
        self._line_at = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Show how far a job is (`storage.observability.progress.Report`)."""
        if not self._phase:
            self._line_at = self._clock() + LINE_SECONDS
        if progress.phase != self._phase:
            self._begin(progress)
        self._bar.update(self._task, completed=progress.done, total=progress.total)
        left = next(task.time_remaining for task in self._bar.tasks if task.id == self._task)
        self._bar.update(self._task, text=amounts(progress, left))
        if self._has_lines and self._clock() >= self._line_at:
            self._line_at = self._clock() + LINE_SECONDS
            self._file.write(f"{progress.phase}: {amounts(progress, left)}\n")
            self._file.flush()

    def _begin(self, progress: Progress) -> None:
        """Begin a phase. Earlier work of an interrupted job does not count as speed."""
        fields: dict[str, Any] = {"completed": progress.done, "total": progress.total, "text": ""}
        if self._phase:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(progress.phase, **fields)
        self._phase = progress.phase


def amounts(progress: Progress, seconds_left: float | None) -> str:
    """Return the amounts in words: "34 %, 1,200 of 3,500 rooms, about 2 min left"."""
    total = progress.total
    if total is None:
        return f"{quantity(progress.done, progress.unit)} {progress.unit}".strip()
    done = min(progress.done, total)
    about = "about " if progress.is_estimate else ""
    unit = "" if progress.unit == "bytes" else f" {progress.unit}"
    parts = [
        f"{int(progress.share * 100)} %" if total else "",
        f"{quantity(done, progress.unit)} of {about}{quantity(total, progress.unit)}{unit}",
        time_left(seconds_left) if seconds_left and done < total else "",
    ]
    return ", ".join(part for part in parts if part)


def quantity(number: float, unit: str) -> str:
    """Return a number for people: with separators, or as 12.3 MB."""
    return decimal(int(number)) if unit == "bytes" else f"{int(number):,}"


def time_left(seconds: float) -> str:
    """Return an estimate in one unit."""
    for size, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.0f} {name} left"
    return "about 1 min left" if seconds >= 45 else "less than a minute left"
