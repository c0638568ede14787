"""envforge diagnose: what went wrong in a log, how sure that is, and what to do."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from typing import BinaryIO

    from envforge.resolver.hosts import Host


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("diagnose")(diagnose)


def diagnose(
    log: Annotated[str, typer.Argument(help="A log file (plain or gzip), or - for standard input.")],
    host: Annotated[Path | None, typer.Option(help="The host's facts, from envforge detect --json.")] = None,
    driver: Annotated[str | None, typer.Option(help="The host's driver version, or none.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when there is a finding.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Read a log and name the cause of a failure, most likely first."""
    import json

    from envforge.diagnose import diagnose as read
    from envforge.resolver.hosts import parse_driver

    version = None
    if driver is not None:  # a branch alone is enough here
        version = driver if re.fullmatch(r"\d{3}", driver.strip()) else parse_driver(driver)
    facts = _host(host) if host is not None else None
    stream = _open(log)
    try:
        report = read(stream, driver=version, no_driver=driver is not None and version is None, host=facts)
    finally:
        if log != "-":
            stream.close()
    for note in report.notes:
        typer.echo(f"note: {note}", err=True)
    if json_:
        typer.echo(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    else:
        from envforge.diagnose.render import text

        typer.echo(text(report, colour=_colour()), nl=False)
    if check and report.findings:
        raise typer.Exit(1)


def _open(log: str) -> BinaryIO:
    from envforge.diagnose import open_log

    if log != "-":
        return open_log(Path(log))
    if sys.stdin.isatty():
        typer.echo("reading the log from the terminal; end it with Ctrl-D", err=True)
    return sys.stdin.buffer


def _host(path: Path) -> Host:
    import json

    from envforge.errors import UsageError
    from envforge.resolver.hosts import parse_host

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error})", "make it with: envforge detect --json") from error
    return parse_host(data, str(path))


def _colour() -> bool:
    import os

    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
