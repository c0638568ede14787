"""envforge job collect: what came of many jobs, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from envforge.jobs.collect import Found, Row
    from envforge.jobs.record import Record


def register(job: typer.Typer) -> None:
    """Add the command."""
    job.command("collect")(collect)


def collect(
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR|JOB]...", help="Folders of jobs or receipts, or jobs. [default: envforge-jobs]"),
    ] = None,
    csv_: Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write CSV here; - is stdout.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a row failed.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Put the receipts of jobs into one table, failed nodes first, with what diagnose makes of their logs."""
    import json

    from envforge.files import write_atomic
    from envforge.jobs.collect import FAILED, to_csv, to_json
    from envforge.jobs.collect import collect as rows_of

    rows = rows_of([_place(word) for word in places or [""]], Explained())
    if csv_ is not None and csv_ != "-":
        write_atomic(Path(csv_), to_csv(rows))
    if csv_ == "-":
        typer.echo(to_csv(rows), nl=False)
    elif json_:
        typer.echo(json.dumps(to_json(rows), indent=1, ensure_ascii=False))
    else:
        _show(rows)
    if check and any(row.result == FAILED for row in rows):
        raise typer.Exit(1)


def _place(word: str) -> Path:
    from envforge.errors import UsageError
    from envforge.jobs.follow import find_record
    from envforge.jobs.record import FOLDER

    path = Path(word or FOLDER)
    if path.exists():
        return path
    if not word:
        raise UsageError(f"there is no folder {FOLDER} here", "name the folder of the jobs")
    record = find_record(word)
    if not record.output:
        raise UsageError(f"nothing is kept here of job {word[:80]}", "name its output folder")
    return Path(record.output)


class Explained:
    """Diagnose's first finding."""

    def receipt(self, receipt: Mapping[str, Any]) -> Found | None:
        """Of a receipt that failed."""
        from envforge.cli.job_report import first_finding

        found = first_finding(receipt)
        return (str(found["id"]), str(found["title"])) if found else None

    def job(self, record: Record) -> Found | None:
        """Of all that is known of a job."""
        from envforge.cli.job_report import diagnosed
        from envforge.jobs.gather import gather

        report = diagnosed(gather(record), None, False, None)
        return (report.findings[0].id, report.findings[0].title) if report.findings else None


def _show(rows: list[Row]) -> None:
    import os
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("result", "job", "node", "state", "grade", "digest", "seconds", "what"):
        table.add_column(name, overflow="fold")
    colours = {"failed": "red", "passed": "green", "open": ""}
    for row in rows:
        found = f"{row.finding}: {row.title}" if row.finding else ""
        what = "; ".join(filter(None, (found, row.detail)))
        code = "" if row.exit_code in (None, 0) else f" ({row.exit_code})"
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        cells = (row.job, row.node, row.state + code, row.grade, row.digest[:19], seconds, what)
        # As plain text: what stands in a log must not be read as markup.
        table.add_row(Text(row.result, style=colours[row.result]), *map(Text, cells))
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    Console(width=None if sys.stdout.isatty() else 200, no_color=not colour, highlight=False).print(table)
