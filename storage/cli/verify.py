"""`room-storage verify`: recompute derived data, report every difference, and repair it."""

from typing import Annotated, Any, NamedTuple

import typer

from storage.cli.common import (
    DsnOption,
    JsonOption,
    QuietOption,
    RoomsOption,
    ServerNameOption,
    run_on_database,
)
from storage.cli.interrupt import AGAIN, UNCHANGED
from storage.cli.output import ExitCode, amount, print_json, print_rows
from storage.database.connection import Database
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.maintenance.local_server import local_server_name
from storage.maintenance.verify import Finding, verify
from storage.maintenance.verify.run import verify_database
from storage.observability.counters import Report
from storage.rebuild import repair

REPAIRED = f"repaired rooms stay repaired; {AGAIN}"


class ReportedFinding(NamedTuple):
    """A finding, and whether it was repaired."""

    finding: Finding
    repaired: bool


def command(
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    *,
    room: RoomsOption = None,
    repairing: Annotated[
        bool,
        typer.Option("--repair", help="Rebuild the derived data of the rooms with findings."),
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Recompute hashes, states, visibility and all other derived data; report differences.

    Exit code 1 if a difference is left.
    """
    reported = run_on_database(
        dsn,
        lambda database, show: _verify(database, server_name, room, show, repairing=repairing),
        REPAIRED if repairing else UNCHANGED,
        quiet=quiet,
    )
    left = sum(not report.repaired for report in reported)
    if as_json:
        print_json({"findings": [_document(report) for report in reported], "left": left})
    else:
        rows = [
            (*_columns(report.finding), "yes" if report.repaired else "no") for report in reported
        ]
        print_rows(
            "Findings",
            ["check", "room", "subject", "found", "expected", "repaired"],
            rows,
            as_json=False,
        )
        typer.echo(
            f"{amount(len(reported), 'finding')}, {len(reported) - left} of them repaired"
            if reported
            else "nothing found"
        )
        lacking = (report.finding.remedy for report in reported if not report.repaired)
        for remedy in dict.fromkeys(lacking):
            typer.echo(f"to repair: {remedy}")
    if left:
        raise SystemExit(ExitCode.FINDINGS)


def _columns(finding: Finding) -> tuple[str, str, str, str, str]:
    return (
        finding.check,
        finding.room_id or "",
        "\n".join(finding.subject),
        finding.found,
        finding.expected,
    )


def _document(reported: ReportedFinding) -> dict[str, Any]:
    finding = reported.finding
    return {
        "check": finding.check,
        "room_id": finding.room_id,
        "subject": list(finding.subject),
        "found": finding.found,
        "expected": finding.expected,
        "repairable": finding.repairable,
        "remedy": finding.remedy,
        "repaired": reported.repaired,
    }


async def _verify(
    database: Database,
    server_name: str | None,
    rooms: list[str] | None,
    show: Report,
    *,
    repairing: bool,
) -> list[ReportedFinding]:
    name = await local_server_name(database, server_name)
    findings = [
        finding async for finding in verify(database, server_name=name, room_ids=rooms, report=show)
    ]
    if not repairing:
        return [ReportedFinding(finding, repaired=False) for finding in findings]
    return await _repaired(database, name, findings, show)


async def _repaired(
    database: Database, server_name: str, findings: list[Finding], show: Report
) -> list[ReportedFinding]:
    """Repair rooms with repairable findings, and shared data; verify them again.

    Raise `StorageCorrupt` where an index is corrupt.
    """
    await refuse_corrupt_indexes(database, "a repair", report=show)
    rooms = await repair(database, findings, server_name=server_name, report=show)
    shared = any(finding.repairable and finding.room_id is None for finding in findings)
    left = {
        finding
        async for finding in verify(database, server_name=server_name, room_ids=rooms, report=show)
    }
    if shared:
        async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
            left |= {finding async for finding in verify_database(conn)}
    verified = {*rooms, *([None] if shared else [])}
    old = [
        ReportedFinding(finding, repaired=finding.room_id in verified and finding not in left)
        for finding in findings
    ]
    return old + [
        ReportedFinding(finding, repaired=False) for finding in left if finding not in findings
    ]
