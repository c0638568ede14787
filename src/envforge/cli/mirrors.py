"""Mirrors and the certificate authority: the settings' layers and the options, on top of what pip is told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from envforge.lock import PipSettings
    from envforge.settings import Settings

MirrorOption = Annotated[
    list[str] | None,
    typer.Option("--mirror", help="KIND=URL instead of the usual place: index, torch, apt, registry or hub."),
]
CaOption = Annotated[Path | None, typer.Option("--ca", help="Certificate file (PEM) of the indexes and mirrors.")]


def chosen_settings(project: Path | None, mirror: list[str] | None = None, ca: Path | None = None) -> Settings:
    """All settings, the options on top.

    Raises:
        UsageError: a --mirror that is not KIND=URL. DataError: a file or value that cannot be.
    """
    from envforge.errors import UsageError
    from envforge.settings import MIRRORS, load_settings

    pairs = [word.partition("=") for word in mirror or ()]
    bad = next((word for word, (kind, _, url) in zip(mirror or (), pairs, strict=True) if not kind or not url), None)
    if bad is not None:
        raise UsageError(f"--mirror {bad[:60]!r} is not KIND=URL", f"kinds: {', '.join(MIRRORS)}")
    mirrors = {kind: url for kind, _, url in pairs}
    return load_settings(project, {"mirrors": mirrors, "ca": ca})


def package_settings(settings: Settings) -> PipSettings:
    """pip's settings on this machine with the mirrors and the certificate file of ours in their place.

    Raises:
        UsageError: the certificate file is none. Others of reading pip's settings.
    """
    import os
    from dataclasses import replace

    from envforge.errors import UsageError
    from envforge.lock import read_pip_settings

    found = read_pip_settings(os.environ)
    if index := settings.mirrors.get("index"):
        # Named here on purpose: it stands for everything that pip would ask.
        found = replace(found, index_url=index, extra_index_urls=(), no_index=False)
    if torch := settings.mirrors.get("torch"):
        found = replace(found, torch_index=torch)
    if settings.ca is not None:
        found = replace(found, cert=str(settings.ca))
    if found.cert is not None and not Path(found.cert).exists():
        raise UsageError(
            f"the certificate file {found.cert} is not there", "correct --ca, the setting ca, or pip's cert"
        )
    return found


def hub_environment(settings: Settings) -> dict[str, str]:
    """What the hub's libraries are told of a mirror."""
    hub = settings.mirrors.get("hub")
    return {"HF_ENDPOINT": hub} if hub else {}
