"""envforge resolve: pinned requirements for the described hosts, or exactly why there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envforge.cli import target as t
from envforge.cli.mirrors import MirrorOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("resolve")(resolve)


def resolve(
    request: Annotated[list[str] | None, typer.Argument(help="PEP 508 requirements, or a project folder.")] = None,
    requirement: Annotated[list[Path] | None, typer.Option("--requirement", "-r", help="A requirements file.")] = None,
    spec: Annotated[str | None, typer.Option(help="A ready-made stack by name, or an image.yaml.")] = None,
    host: t.HostOption = None,
    fleet: t.FleetOption = None,
    driver: t.DriverOption = None,
    gpu: t.GpuOption = None,
    glibc: t.GlibcOption = None,
    arch: t.ArchOption = None,
    python: t.PythonOption = None,
    variant: t.VariantOption = "auto",
    as_of: Annotated[str | None, typer.Option(help="Coherence date (YYYY-MM-DD), or today.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A stale package is an error.")] = False,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave this host out of the fleet.")] = None,
    allow_uncapped: Annotated[bool, typer.Option("--allow-uncapped", help="Old trainers may skip newer caps.")] = False,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Never choose what must be compiled.")] = False,
    upgrade: Annotated[list[str] | None, typer.Option(help="Let this package of a project move.")] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="Start from this plan, lock or pinned file: change least.")
    ] = None,
    prefer: Annotated[str | None, typer.Option(help="verified: sets with a receipt first.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say for each pin what decided it.")] = False,
    lock: Annotated[
        bool | None, typer.Option("--lock/--no-lock", help="The whole closure with hashes (default for projects).")
    ] = None,
    mirror: MirrorOption = None,
    format: Annotated[str, typer.Option(help="requirements or pylock.")] = "requirements",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the answer to this file.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Select pins that run on the described hosts."""
    from envforge.cli.answer import Outcome, answer_json, answer_text, notes, run_resolve
    from envforge.cli.mirrors import chosen_settings
    from envforge.errors import ConflictError, NoError, OutsideError, UsageError
    from envforge.intake import project_of

    if format not in ("requirements", "pylock"):
        raise UsageError(f"unknown format {format!r}", "known: requirements, pylock")
    project = project_of(request or [])
    if lock is None:
        lock = project is not None
    if format == "pylock" and not lock:
        raise UsageError("a pylock needs the whole closure", "add --lock")
    targets = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant, exclude)
    failure: OutsideError | None = None
    try:
        outcome = run_resolve(
            request or [],
            requirement or [],
            spec,
            targets,
            as_of=as_of,
            allow_uncapped=allow_uncapped,
            no_compile=no_compile,
            lock=lock,
            upgrade=tuple(upgrade or ()),
            prefer=prefer,
            explain=explain,
            start=start,
            chosen=chosen_settings(project, mirror),
        )
    except OutsideError as error:
        if not isinstance(error.kept, Outcome):
            raise
        # The plan is printed and kept although it could not be locked; a lock of an earlier plan stays as it is.
        failure, outcome = error, error.kept
    stale = [w.text for w in outcome.answer.plan.warnings if w.id == "stale"] if outcome.answer.plan else []
    if strict and stale:
        raise NoError("a requested package is stale: " + "; ".join(stale), "pin it, or leave --strict out", id="stale")
    if project is not None and outcome.answer.plan is not None:
        from envforge.lock import write_lock
        from envforge.project import write_plan

        write_plan(project, outcome.answer.plan)
        if outcome.lock is not None:
            write_lock(outcome.lock, project)
    text = answer_json(outcome) if json_ else answer_text(outcome, format, explain)
    if outcome.lock is not None and not json_:
        # Standard output is the lock's, which has no place for them.
        for line in notes(outcome):
            typer.echo(line, err=True)
    if failure is not None:
        typer.echo(text, nl=not text.endswith("\n"))
        raise failure
    if output is not None and outcome.answer.plan is not None:
        from envforge.files import write_atomic

        write_atomic(output, text)
    elif text:
        typer.echo(text, nl=not text.endswith("\n"))
    if outcome.answer.conflict is not None:
        if json_:
            raise typer.Exit(1)
        if outcome.plans:
            from envforge.resolver.fleet import fleet_text

            typer.echo("\n".join(f"# {line}" for line in fleet_text(outcome.plans)))
        raise ConflictError(outcome.conflict_text(), outcome.fix_text())
