"""Print tables one by one for people; for programs all of them at the end, as one document."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import typer

from storage.cli.output import print_json, print_rows


@dataclass(slots=True)
class TablePrinter:
    """Takes tables, each with a title and a sentence about it."""

    as_json: bool
    tables: list[dict[str, object]] = field(default_factory=list)

    def table(
        self, title: str, about: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
    ) -> None:
        """Show one table."""
        if self.as_json:
            self.tables.append(
                {"title": title, "rows": [dict(zip(columns, row, strict=True)) for row in rows]}
            )
            return
        typer.echo("")
        print_rows(title, columns, rows, as_json=False)
        typer.echo(about)

    def line(self, text: str) -> None:
        """Print a line for people."""
        if not self.as_json:
            typer.echo(text)

    def end(self) -> None:
        """Print the document for programs."""
        if self.as_json:
            print_json(self.tables)
