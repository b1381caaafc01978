"""`room-storage train-dictionary`: train a dictionary for the stored bytes of events."""

from dataclasses import asdict
from typing import Annotated

import typer

from storage.cli.common import DsnOption, JsonOption, QuietOption, run_on_database
from storage.cli.interrupt import UNCHANGED
from storage.cli.output import amount, print_json
from storage.maintenance.reencode import EVENTS, Trained, train_dictionary


def command(
    dsn: DsnOption = None,
    *,
    events: Annotated[
        int, typer.Option(metavar="N", help="The events of the sample, half of them to compare.")
    ] = EVENTS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only compare, and store nothing.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a dictionary on stored events, and store it if it makes new events shorter.

    Events keep their form until `room-storage jobs --re-encode`.
    """
    done = run_on_database(
        dsn,
        lambda database, show: train_dictionary(
            database, events=events, dry_run=dry_run, report=show
        ),
        UNCHANGED,
        quiet=quiet,
    )
    if as_json:
        print_json({"dry_run": dry_run} | asdict(done))
        return
    _print_trained(done, dry_run=dry_run)


def _print_trained(done: Trained, *, dry_run: bool) -> None:
    typer.echo(
        f"trained on {amount(done.events, 'event')}, compared on {amount(done.compared, 'other')}:"
        f" {done.received_bytes:,} bytes each as received"
    )
    typer.echo(f"  the present dictionary {done.present_id:06x}: {done.present_bytes:,} bytes")
    typer.echo(f"  the new dictionary {done.trained_id:06x}: {done.trained_bytes:,} bytes")
    if done.is_stored:
        typer.echo("the new one is stored: writers use it from now on")
        typer.echo("to encode older events with it: room-storage jobs --re-encode")
    elif done.is_better and dry_run:
        typer.echo("the new one would be stored")
    else:
        typer.echo("the present one stays: the new one saves too little")
