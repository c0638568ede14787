"""envforge render: the Dockerfile and its build context in a folder, for builders of one's own. Needs no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envforge.cli import target as t
from envforge.cli.mirrors import CaOption, MirrorOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("render")(render)


def render(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the build context.")],
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
    dialect: Annotated[str, typer.Option(help="buildkit, or plain for builders without RUN --mount.")] = "buildkit",
    base: Annotated[str | None, typer.Option(help="Base image instead of the matrix's choice.")] = None,
    wheelhouse: Annotated[Path | None, typer.Option(help="Folder of wheels to take first.")] = None,
    ca: CaOption = None,
    mirror: MirrorOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write the Dockerfile of a plan and everything that it copies into a folder."""
    import json
    import sys

    from envforge.cli.planned import find_plan, spec_pythons, surroundings
    from envforge.cli.stages import stage_printer
    from envforge.errors import UsageError
    from envforge.image.build import render_plan
    from envforge.image.values import BuildOptions

    if dialect not in ("buildkit", "plain"):
        raise UsageError(f"no dialect is named {dialect!r}", "known: buildkit, plain")
    targets = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant)
    with stage_printer(sys.stderr) as progress:
        around = surroundings(None, base, targets, spec_pythons(request or [], requirement or [], spec))
        found = find_plan(
            request or [],
            requirement or [],
            spec,
            targets,
            wheelhouse=wheelhouse,
            ca=ca,
            mirror=mirror,
            progress=progress,
            around=around,
        )
        options = BuildOptions(source=found.source, dialect="plain" if dialect == "plain" else "buildkit", base=base)
        context = render_plan(found.plan, found.lock, found.spec, options, output, bases=found.bases)
    answer = {
        "schema": 1,
        "folder": str(output),
        "base": context.base.ref,
        "tag": context.tag,
        "dialect": context.dialect,
        "files": sorted(context.files),
    }
    typer.echo(json.dumps(answer, indent=1) if json_ else f"{output}/Dockerfile")
