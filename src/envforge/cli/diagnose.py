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
    log: Annotated[
        str | None, typer.Argument(help="A log file (plain or gzip), or - for standard input.", show_default=False)
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(help="A job instead: number, name, folder or job.json. All its ranks and its scheduler's words."),
    ] = None,
    host: Annotated[Path | None, typer.Option(help="The host's facts, from envforge detect --json.")] = None,
    driver: Annotated[str | None, typer.Option(help="The host's driver version, or none.")] = None,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE.tar.gz", help="Pack all of it, without secrets and names, to send.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when there is a finding.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Read a log, or all that is known of a job, and name the cause of a failure, most likely first."""
    import json
    from dataclasses import replace

    from envforge.diagnose import diagnose as read
    from envforge.errors import UsageError
    from envforge.resolver.hosts import parse_driver

    if (log is None) == (job is None):
        raise UsageError("one log or one job is needed", "envforge diagnose LOG, or envforge diagnose --job JOB")
    version = None
    if driver is not None:  # a branch alone is enough here
        version = driver if re.fullmatch(r"\d{3}", driver.strip()) else parse_driver(driver)
    facts = _host(host) if host is not None else None
    no_driver = driver is not None and version is None
    secrets: tuple[str, ...] = ()
    texts: dict[str, str] = {}
    files: list[tuple[str, Path]] = []
    if job is not None:
        from envforge.cli.job_report import diagnosed, find_job
        from envforge.jobs.gather import ACCOUNTING

        found = find_job(job)
        report = diagnosed(found, version, no_driver, facts)
        report = replace(report, notes=(*found.notes, *report.notes))
        files = [(path.name, path) for path in (*found.logs, *found.files)]
        texts[ACCOUNTING] = found.accounting
        secrets = found.secrets
    else:
        assert log is not None
        stream, kept = _open(log, bundle is not None)
        try:
            report = read(stream, driver=version, no_driver=no_driver, host=facts)
        finally:
            if log != "-":
                stream.close()
        if kept is not None:
            texts["log.txt"] = kept
        elif log != "-":
            files = [(Path(log).name.removesuffix(".gz"), Path(log))]
    for note in report.notes:
        typer.echo(f"note: {note}", err=True)
    if bundle is not None:
        from envforge.cli.job_report import bundle as pack

        counts = pack(bundle, report, files, texts, secrets)
        taken = ", ".join(f"{count} x {what}" for what, count in counts.items()) or "nothing had to be taken out"
        typer.echo(f"packed {bundle} without: {taken}; look it over before you send it", err=True)
    if json_:
        typer.echo(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    else:
        from envforge.diagnose.render import text

        typer.echo(text(report, colour=_colour()), nl=False)
    if check and report.findings:
        raise typer.Exit(1)


def _open(log: str, keep: bool) -> tuple[BinaryIO, str | None]:
    """The log's stream; with `keep`, standard input's text too, which can be read only once."""
    import io

    from envforge.diagnose import open_log

    if log != "-":
        return open_log(Path(log)), None
    if sys.stdin.isatty():
        typer.echo("reading the log from the terminal; end it with Ctrl-D", err=True)
    if not keep:
        return sys.stdin.buffer, None
    data = sys.stdin.buffer.read()
    return io.BytesIO(data), data.decode("utf-8", "replace")


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
