"""Mirrors and certificates: from files, variables and options to what pip, uv, apt, registries and hubs are told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envforge.cli.mirrors import chosen_settings, hub_environment, package_settings
from envforge.cli.source import host_arguments, install_source
from envforge.errors import DataError, UsageError
from envforge.image.base import mirrored
from envforge.image.context import write_secrets
from envforge.lock import PipSettings
from envforge.lock.formats import Lock, LockedPackage
from envforge.lock.settings import uv_environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of this machine counts."""
    monkeypatch.setattr("envforge.settings.SITE", tmp_path / "etc")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("ENVFORGE_MIRRORS", "ENVFORGE_CA", "PIP_INDEX_URL", "PIP_CERT", "UV_INDEX", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)


def torch_lock(index: str) -> Lock:
    """A lock whose torch came from an index of its own."""
    package = LockedPackage("torch", "2.6.0+cu126", "torch", ("sha256:0",), "torch.whl")
    return Lock("", "", (package,), "0" * 64, "3.11", "x86_64", "cu126", torch_index=index)


def test_options_stand_over_files_and_a_mirror_over_what_pip_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.example/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://extra.example/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    project = tmp_path / "project"
    project.mkdir()
    (project / "envforge.toml").write_text('mirrors = {pypi = "https://file.example/simple", apt = "http://a.example"}')
    (tmp_path / "ca.pem").write_text("x")
    settings = chosen_settings(project, ["index=https://option.example/simple"], tmp_path / "ca.pem")
    assert settings.mirrors == {"index": "https://option.example/simple", "apt": "http://a.example"}
    found = package_settings(settings)
    assert (found.index_url, found.extra_index_urls, found.no_index) == ("https://option.example/simple", (), False)
    assert found.cert == str(tmp_path / "ca.pem")
    assert package_settings(chosen_settings(None)).no_index, "without a mirror pip's own word counts"


@pytest.mark.parametrize("word", ["index", "index=", "=https://x.example", "https://x.example"])
def test_what_is_no_mirror(word: str) -> None:
    with pytest.raises((UsageError, DataError)):
        chosen_settings(None, [word])


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(DataError) as error:
        chosen_settings(None, ["npm=https://x.example"])
    assert "index, torch, apt, registry, hub" in error.value.cause


def test_torchs_index_keeps_its_name_and_its_login_out_of_arguments() -> None:
    settings = PipSettings(torch_index="https://user:s3cr3t@torch.example/whl")
    index = "https://torch.example/whl/cu126"
    arguments = host_arguments(settings, index)
    assert arguments[-2:] == ["--index", f"torch={index}"]
    environment = uv_environment(settings, {})
    assert (environment["UV_INDEX_TORCH_USERNAME"], environment["UV_INDEX_TORCH_PASSWORD"]) == ("user", "s3cr3t")
    source = install_source(settings, torch_lock(index))
    assert source.secret
    assert "s3cr3t" not in " ".join(source.arguments)
    assert tomllib.loads(source.uv_config)["extra-index-url"] == ["https://user:s3cr3t@torch.example/whl/cu126"]


def test_a_lock_of_another_index_gets_no_login() -> None:
    settings = PipSettings(torch_index="https://user:s3cr3t@torch.example/whl")
    source = install_source(settings, torch_lock("https://other.example/whl/cu126"))
    assert "s3cr3t" not in source.uv_config


@pytest.mark.parametrize(
    ("ref", "made"),
    [
        ("python:3.11-slim", "m.example/hub/library/python:3.11-slim"),
        ("docker.io/python:3.11", "m.example/hub/library/python:3.11"),
        ("nvidia/cuda:12.6.3-devel-ubuntu22.04", "m.example/hub/nvidia/cuda:12.6.3-devel-ubuntu22.04"),
        (f"python:3.11@sha256:{'a' * 64}", f"m.example/hub/library/python:3.11@sha256:{'a' * 64}"),
        ("registry.example/python:3.11", "registry.example/python:3.11"),
        ("localhost:5000/python:3.11", "localhost:5000/python:3.11"),
    ],
)
def test_docker_hub_goes_through_its_mirror(ref: str, made: str) -> None:
    assert mirrored(ref, "https://m.example/hub") == made
    assert mirrored(ref, None) == ref


def test_secrets_are_files_for_us_alone(tmp_path: Path) -> None:
    (tmp_path / "own, ca.pem").write_text("CERTIFICATE")
    (tmp_path / "secrets").mkdir()
    mirrors = {"apt": "http://user:pw@a.example", "hub": "https://hub.example"}
    source = install_source(PipSettings(), None, ca=tmp_path / "own, ca.pem", mirrors=mirrors)
    assert source.secret
    assert "pw" not in repr(source)
    files = write_secrets(source, tmp_path / "secrets")
    assert {name: path.stat().st_mode & 0o777 for name, path in files.items()} == {
        "uv.toml": 0o600, "ca.pem": 0o600, "apt.mirror": 0o600,
    }  # fmt: skip
    assert files["apt.mirror"].read_text() == "http://user:pw@a.example"
    assert not any("," in str(path.name) for path in files.values())


def test_the_hub_is_told_through_its_own_variable() -> None:
    assert hub_environment(chosen_settings(None, ["hub=https://hub.example"])) == {"HF_ENDPOINT": "https://hub.example"}
    assert hub_environment(chosen_settings(None)) == {}


def test_a_certificate_file_that_is_not_there_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"missing\.pem is not there"):
        package_settings(chosen_settings(None, ca=tmp_path / "missing.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
    with pytest.raises(UsageError, match=r"gone\.pem is not there"):
        package_settings(chosen_settings(None))
