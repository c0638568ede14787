"""envforge build: resolve, lock, build and prove; an environment that was built before is found, not built again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from envforge.cli import target as t
from envforge.cli.mirrors import CaOption, MirrorOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("build")(build)


def build(
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
    engine: Annotated[str, typer.Option(help="auto, docker, podman, buildah or venv.")] = "auto",
    base: Annotated[str | None, typer.Option(help="Base image (venv: interpreter) instead of the matrix's.")] = None,
    tag: Annotated[str | None, typer.Option(help="A second name for the image.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of a venv build.")] = None,
    dialect: Annotated[str, typer.Option(help="buildkit, or plain for engines without it.")] = "buildkit",
    wheelhouse: Annotated[Path | None, typer.Option(help="Folder of wheels to take first, or a bundle.")] = None,
    ca: CaOption = None,
    mirror: MirrorOption = None,
    model: Annotated[
        str | None, typer.Option(help="Model for the proof: folder, hub id, or the word small (the default).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of the proof.")] = None,
    network: Annotated[str | None, typer.Option(help="Network of the build steps (docker's names).")] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Leave the proof out.")] = False,
    refresh_base: Annotated[
        bool, typer.Option("--refresh-base", help="Fetch the base by its tag, and take the newest system packages.")
    ] = False,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="The same image id each time (times come from SOURCE_DATE_EPOCH).")
    ] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build even if it is there.")] = False,
    registry: Annotated[str | None, typer.Option(help="Look there before building: registry.example/team.")] = None,
    push: Annotated[bool, typer.Option("--push", help="Push what was built to the registry.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Build the environment of a plan, and prove that it chats and trains."""
    import json
    import os

    from envforge.cli.findings import explain
    from envforge.cli.outcome import report, write_project
    from envforge.cli.packed import start
    from envforge.cli.stages import stage_printer
    from envforge.errors import UsageError
    from envforge.image.build import build_plan
    from envforge.image.engines import choose_engine
    from envforge.image.engines.venv import VenvEngine
    from envforge.image.registry import RegistryError
    from envforge.image.values import BuildOptions, BuildResult
    from envforge.intake import project_of
    from envforge.settings import load_settings

    if push and no_verify:
        raise UsageError("what is pushed is proven, and --no-verify leaves the proof out", "leave one of the two out")
    if dialect not in ("buildkit", "plain"):
        raise UsageError(f"no dialect is named {dialect!r}", "known: buildkit, plain")
    targets = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant)
    with stage_printer(sys.stderr) as progress:
        # Asked first: whoever has no engine should not wait for the lock to hear it.
        place = output or project_of(request or [])
        chosen = choose_engine(engine, output)
        if chosen.name == "venv":
            if place is None:
                raise UsageError(
                    "no container engine answers, and the venv engine needs a folder to build in"
                    if engine == "auto"
                    else "the venv engine needs a folder to build in",
                    "name one: --output DIR",
                )
            chosen = folder = VenvEngine(place)
            folder.check_folder()
        begun = start(
            chosen,
            request or [],
            requirement or [],
            spec,
            targets,
            base=base,
            model=model,
            wheelhouse=wheelhouse,
            ca=ca,
            mirror=mirror,
            progress=progress,
        )
        found = begun.found
        options = BuildOptions(
            source=found.source,
            engine=engine,
            dialect="plain" if dialect == "plain" else "buildkit",
            base=begun.base,
            base_digest=begun.base_digest,
            tag=tag,
            output=place,
            verify=not no_verify,
            model=begun.model,
            steps=steps,
            epoch=_epoch(os.environ.get("SOURCE_DATE_EPOCH")),
            network=network,
            rebuild=rebuild,
            refresh_base=refresh_base,
            reproducible=reproducible,
            registry=load_settings(found.project, {"registry": registry}).registry,
            push=push,
        )
        try:
            result = build_plan(
                found.plan,
                found.lock,
                found.spec,
                options,
                bases=found.bases,
                progress=progress,
                engine=chosen,
                make_model=begun.make_model,
                explain=explain,
                measure=begun.measure,
            )
        except RegistryError as error:
            # The plan stands, and so does an image that only could not be pushed.
            if found.project is not None:
                write_project(found, error.kept if isinstance(error.kept, BuildResult) else None)
            raise
    if found.project is not None:
        write_project(found, result)
    if json_:
        typer.echo(json.dumps(result.to_json() | {"proof": result.proof}, indent=1, ensure_ascii=False))
        return
    typer.echo(report(result, gpu=found.plan.variant != "cpu"))


def _epoch(text: str | None) -> int | None:
    from envforge.errors import UsageError

    if not text:
        return None
    if not text.isdecimal() or len(text) > 11:
        raise UsageError(f"SOURCE_DATE_EPOCH is {text[:40]!r}", "it holds whole seconds since 1970, or is not set")
    return int(text)
