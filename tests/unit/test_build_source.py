"""pip's settings as builds inside containers get them: as a secret, without folders of this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from envforge.cli.outcome import run_line
from envforge.cli.source import host_arguments, install_source, uv_config
from envforge.errors import UsageError
from envforge.image.values import BuildResult
from envforge.lock import PipSettings
from envforge.lock.formats import Lock, LockedPackage
from envforge.lock.settings import default_index

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TORCH = "https://download.pytorch.org/whl/cu126"


def lock_with(*packages: LockedPackage, torch_index: str | None = None) -> Lock:
    """A lock as far as the sources of its packages go."""
    return Lock("", "", packages, "0" * 64, "3.11", "x86_64", "cu126", torch_index=torch_index)


def test_the_index_is_always_named() -> None:
    assert tomllib.loads(uv_config(PipSettings(), None)) == {"index-url": default_index()}
    assert "--default-index" in host_arguments(PipSettings(), None)


def test_addresses_are_kept_and_local_folders_left_out() -> None:
    settings = PipSettings(
        index_url="https://u:p%40@a.example/simple",
        extra_index_urls=("https://b.example/simple", "file:///srv/simple", "/srv/simple"),
        find_links=("/srv/wheels", "https://c.example/links"),
        trusted_hosts=("d.example",),
    )
    assert tomllib.loads(uv_config(settings, TORCH)) == {
        "index-url": "https://u:p%40@a.example/simple",
        "extra-index-url": ["https://b.example/simple", TORCH],
        "find-links": ["https://c.example/links"],
        "allow-insecure-host": ["d.example"],
    }
    assert tomllib.loads(uv_config(PipSettings(no_index=True), TORCH)) == {"no-index": True}


def test_the_torch_index_is_asked_only_where_a_package_came_from_it(tmp_path: Path) -> None:
    local = LockedPackage("torch", "2.6.0+cu126", "find-links", ("sha256:0",), "x.whl", path=str(tmp_path / "x.whl"))
    source = install_source(PipSettings(), lock_with(local, torch_index=TORCH))
    assert TORCH not in source.uv_config
    assert source.wheelhouses == (tmp_path,)
    remote = LockedPackage("torch", "2.6.0+cu126", "torch", ("sha256:0",), "x.whl")
    assert TORCH in install_source(PipSettings(), lock_with(remote, torch_index=TORCH)).uv_config


def test_passwords_are_marked_and_never_shown() -> None:
    source = install_source(PipSettings(index_url="https://user:s3cr3t@a.example/simple"), lock_with())
    assert source.secret
    assert "s3cr3t" not in " ".join(source.arguments)
    assert "s3cr3t" not in repr(source)
    assert not install_source(PipSettings(index_url="https://a.example/simple"), lock_with()).secret


def test_the_printed_run_command_gives_shared_memory_and_gpus() -> None:
    made = BuildResult("docker", "envforge/x:1", "sha256:0", "0", False, 1.0, 1)
    assert run_line(made, gpu=True) == "docker run --rm --gpus all --shm-size 1g envforge/x:1 python ..."
    assert "--gpus" not in run_line(made, gpu=False)
    assert run_line(replace(made, engine="venv", reference="d"), gpu=True) == "d/bin/envforge-entrypoint python ..."


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        install_source(PipSettings(cert=str(tmp_path / "none.pem")), lock_with())
    with pytest.raises(UsageError):
        install_source(PipSettings(), lock_with(), wheelhouse=tmp_path / "none")
