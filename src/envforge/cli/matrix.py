"""envforge matrix: ask the matrix, check it, keep it."""

from __future__ import annotations

from typing import Annotated

import typer

from envforge.cli import target as t


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="Ask the matrix, check it, keep it.", no_args_is_help=True)
    group.command("why")(why)
    app.add_typer(group, name="matrix")


def why(
    pins: Annotated[list[str], typer.Argument(help="Pins such as torch==2.1.2 numpy==2.0.0.")],
    host: t.HostOption = None,
    fleet: t.FleetOption = None,
    driver: t.DriverOption = None,
    gpu: t.GpuOption = None,
    glibc: t.GlibcOption = None,
    arch: t.ArchOption = None,
    python: t.PythonOption = None,
    variant: t.VariantOption = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Do these pins go together (and on this host, where one is described)? Which rows decide, from which source?"""
    import json

    from envforge.errors import UsageError
    from envforge.matrix.load import load_matrix
    from envforge.resolver.check import judge
    from envforge.resolver.hosts import Host
    from envforge.resolver.request import parse_request

    wanted: dict[str, str] = {}
    for line in pins:
        request = parse_request(line)
        if request.pinned is None:
            raise UsageError(f"{line} is not an exact pin", "give exact versions, for example torch==2.1.2")
        wanted[request.name] = request.pinned
        if request.local:
            variant = request.local
    targets = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant)
    described = bool(host or fleet or driver or gpu)
    # Without a described host the question is about the packages alone, whatever torch build they would use.
    hosts = targets.read() if described else (Host("any", None, glibc=glibc, arch=arch or "x86_64"),)
    chosen = None if variant == "auto" else variant
    verdict = judge(load_matrix(), wanted, hosts, python, chosen, any_variant=not described)
    if json_:
        rows = {
            "schema": 1,
            "ok": verdict.ok,
            "broken": [{"text": s.text, "source": s.source} for s in verdict.broken],
            "missing": [{"text": s.text, "source": s.source} for s in verdict.missing],
            "unknown": list(verdict.unknown),
        }
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        typer.echo("yes: nothing in the matrix stands against it" if verdict.ok else "no:")
        for statement in verdict.broken:
            typer.echo(f"  {statement.text}\n    source: {statement.source or 'the question itself'}")
        for statement in verdict.missing:
            typer.echo(f"  also needed: {statement.text}\n    source: {statement.source}")
        for name in verdict.unknown:
            typer.echo(f"  not in the matrix: {name}")
    if not verdict.ok:
        raise typer.Exit(1)
