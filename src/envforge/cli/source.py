"""What pip and uv are told on this machine, as a build inside a container needs it. Shared by render and build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from envforge.image.values import InstallSource
    from envforge.lock import Lock, PipSettings


def install_source(
    settings: PipSettings,
    lock: Lock | None,
    *,
    ca: Path | None = None,
    wheelhouse: Path | None = None,
    mirrors: Mapping[str, str] | None = None,
) -> InstallSource:
    """The settings of pip as a uv configuration for build steps, and as uv takes them on this machine.

    Wheels that lie on this machine (find-links folders, the wheelhouse, file indexes) are carried into the build;
    addresses of local folders mean nothing inside it and are left out of its configuration. Without a lock only what
    the settings say.

    Raises:
        UsageError: a certificate file or wheelhouse that is not there.
    """
    import os

    from envforge.image.values import InstallSource
    from envforge.lock.settings import secrets, split_credentials, uv_environment

    ca = ca or (Path(settings.cert) if settings.cert else None)
    if ca is not None and not ca.is_file():
        raise UsageError(f"the certificate file {ca} is not there", "name another with --ca, or correct pip's setting")
    if wheelhouse is not None and not wheelhouse.is_dir():
        raise UsageError(f"the wheelhouse {wheelhouse} is not a folder")
    folders = [wheelhouse] if wheelhouse is not None else []
    folders += settings.local_folders()
    folders += [Path(package.path).parent for package in lock.packages if package.path] if lock else []
    torch_index = None
    if lock and lock.torch_index and any(package.kind == "torch" for package in lock.packages):
        torch_index = with_login(lock.torch_index, settings)
    return InstallSource(
        uv_config=uv_config(settings, torch_index),
        ca=ca,
        wheelhouses=tuple(dict.fromkeys(folder.resolve() for folder in folders)),
        secret=bool(secrets(settings)) or any(split_credentials(url)[1] for url in (mirrors or {}).values()),
        arguments=tuple(host_arguments(settings, torch_index)),
        environment=uv_environment(settings, os.environ),
        apt=(mirrors or {}).get("apt"),
        registry=(mirrors or {}).get("registry"),
        hub=(mirrors or {}).get("hub"),
    )


def with_login(torch_index: str, settings: PipSettings) -> str:
    """The address of torch's index, which a lock keeps bare, with the user name and password that belong to it."""
    from envforge.lock.settings import join_credentials, split_credentials

    root, user, password = split_credentials(settings.torch_index)
    if user is None or not torch_index.startswith(root.rstrip("/")):
        return torch_index
    return join_credentials(torch_index, user, password)


def uv_config(settings: PipSettings, torch_index: str | None) -> str:
    """The text of a uv.toml for build steps. It may hold credentials: it is only ever passed as a secret."""
    from envforge.lock.settings import default_index

    lines = []
    if settings.no_index:
        lines.append("no-index = true")
    else:
        lines.append(f"index-url = {_toml(settings.index_url or default_index())}")
        extra = [url for url in settings.extra_index_urls if _remote(url)]
        extra += [torch_index] if torch_index else []
        if extra:
            lines.append(f"extra-index-url = [{', '.join(map(_toml, extra))}]")
    links = [link for link in settings.find_links if _remote(link)]
    if links:
        lines.append(f"find-links = [{', '.join(map(_toml, links))}]")
    if settings.trusted_hosts:
        lines.append(f"allow-insecure-host = [{', '.join(map(_toml, settings.trusted_hosts))}]")
    return "\n".join(lines) + "\n"


def host_arguments(settings: PipSettings, torch_index: str | None) -> list[str]:
    """uv's options for an install on this machine; an index is always named."""
    from envforge.lock import index_arguments
    from envforge.lock.settings import TORCH, default_index, split_credentials

    arguments = index_arguments(settings)
    if not settings.no_index and "--default-index" not in arguments:
        arguments += ["--default-index", default_index()]
    if torch_index and not settings.no_index:
        # By the name that its credentials in the environment are tied to.
        arguments += ["--index", f"{TORCH}={split_credentials(torch_index)[0]}"]
    return arguments


def _remote(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def _toml(text: str) -> str:
    # JSON strings without control characters are TOML basic strings.
    return json.dumps(text, ensure_ascii=False)
