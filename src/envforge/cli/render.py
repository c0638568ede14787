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
    wheelhouse: Annotated[Path | None, typer.Option(help="Folder of wheels to take first, or a bundle.")] = None,
    ca: CaOption = None,
    mirror: MirrorOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write the Dockerfile of a plan and everything that it copies into a folder."""
    import json
    import shlex
    import sys

    from envforge.cli.packed import find_start
    from envforge.cli.stages import stage_printer
    from envforge.errors import UsageError
    from envforge.image.build import context_folder, render_plan
    from envforge.image.values import BuildOptions

    if dialect not in ("buildkit", "plain"):
        raise UsageError(f"no dialect is named {dialect!r}", "known: buildkit, plain")
    context_folder(output)  # asked first: nobody should wait for the lock to hear it
    targets = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant)
    words, files = request or [], requirement or []
    with stage_printer(sys.stderr) as progress:
        found, bundle = find_start(
            None, words, files, spec, targets, base=base, wheelhouse=wheelhouse, ca=ca, mirror=mirror, progress=progress
        )
        # The base of a bundle has the name there under which `build` loads it; another base has other packages.
        own = bundle if base is None else None
        options = BuildOptions(
            source=found.source,
            dialect="plain" if dialect == "plain" else "buildkit",
            base=own.base_name() if own else base,
            base_digest=(own.base or {}).get("digest") if own else None,
        )
        system = own.system if own else None
        context = render_plan(found.plan, found.lock, found.spec, options, output, bases=found.bases, system=system)
    answer = {
        "schema": 1,
        "folder": str(output),
        "base": context.base.ref,
        "tag": context.tag,
        "dialect": context.dialect,
        "files": sorted(context.files),
    }
    typer.echo(json.dumps(answer, indent=1) if json_ else f"{output}/Dockerfile")
    if own is not None:
        load = f"tar -C {shlex.quote(str(own.folder / 'base'))} -c . | docker load"
        typer.echo(f"the base {context.base.ref} is in the bundle; before the build: {load}", err=True)
