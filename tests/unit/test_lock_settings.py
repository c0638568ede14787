"""pip's settings as uv is told of them. The reference is pip's own option parser."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import envforge.lock.settings as settings_module
from envforge.errors import DataError
from envforge.lock.settings import (
    PipSettings,
    config_files,
    index_arguments,
    index_environment,
    read_constraints,
    read_pip_settings,
    redact,
    secrets,
    split_credentials,
    uv_environment,
)

SECRET = "https://anna:s3cr%40t@index.example/simple"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment in which only files below tmp_path configure pip (and the interpreter's own pip.conf)."""
    return {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CONFIG_DIRS": f"{tmp_path / 'xdg1'}:{tmp_path / 'xdg2'}",
        "PATH": os.environ.get("PATH", ""),
    }


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/pip.conf of the machine that runs the tests does not count."""
    monkeypatch.setattr(settings_module, "SHARED", (Path("/nowhere"),))


def layers(tmp_path: Path) -> None:
    write(tmp_path / "xdg1/pip/pip.conf", "[global]\nindex-url = https://shared.example/simple\nno-index = no\n")
    write(
        tmp_path / "xdg2/pip/pip.conf", "[global]\ncert = /shared.pem\nfind-links =\n  /a\n  https://b.example/links\n"
    )
    write(tmp_path / ".pip/pip.conf", "[global]\nextra_index_url = https://old.example/simple\ntimeout = 7\n")
    write(
        tmp_path / "config/pip/pip.conf", "[install]\nextra-index-url = https://one.example/s https://two.example/s\n"
    )


ASK = """
import json
from pip._internal.commands import create_command
options, _ = create_command("install").parser.parse_args([])
names = ("index_url", "extra_index_urls", "find_links", "cert", "trusted_hosts", "constraints", "timeout", "no_index")
print(json.dumps({name: getattr(options, name) for name in names}))
"""


def from_pip(env: dict[str, str]) -> dict[str, Any]:
    """The options that `pip install` ends up with. (`pip config list` prints files by name, not by precedence.)"""
    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="the reference is pip")
@pytest.mark.parametrize("own", [False, True])
def test_reads_what_pip_reads(tmp_path: Path, home: dict[str, str], own: bool) -> None:
    layers(tmp_path)
    if own:  # a file named by PIP_CONFIG_FILE takes the place of the user's
        home["PIP_CONFIG_FILE"] = str(
            write(tmp_path / "own.conf", "[global]\nindex-url = https://own.example/simple\n")
        )
    home["PIP_TRUSTED_HOST"] = "one.example two.example:8443"
    home["PIP_CONSTRAINT"] = "/c1.txt /c2.txt"
    pip, ours = from_pip(home), read_pip_settings(home)
    assert ours.index_url == pip["index_url"]
    assert list(ours.extra_index_urls) == pip["extra_index_urls"]
    assert list(ours.find_links) == pip["find_links"]
    assert ours.cert == pip["cert"]
    assert list(ours.trusted_hosts) == pip["trusted_hosts"]
    assert list(ours.constraints) == pip["constraints"]
    assert (ours.timeout or 15) == pip["timeout"]
    assert ours.no_index == pip["no_index"]


@pytest.mark.usefixtures("no_machine")
def test_layers_come_in_pips_order(tmp_path: Path, home: dict[str, str]) -> None:
    layers(tmp_path)
    got = read_pip_settings(home)
    assert got.extra_index_urls == ("https://one.example/s", "https://two.example/s")  # install over global
    assert got.timeout == 7
    assert got.cert == "/shared.pem"
    assert got.find_links == ("/a", "https://b.example/links")
    home["PIP_INDEX_URL"] = "https://env.example/simple/"
    assert read_pip_settings(home).index_url == "https://env.example/simple"


def test_null_device_means_no_files(tmp_path: Path, home: dict[str, str]) -> None:
    layers(tmp_path)
    home["PIP_CONFIG_FILE"] = os.devnull
    assert config_files(home) == []
    assert read_pip_settings(home) == PipSettings()


@pytest.mark.usefixtures("no_machine")
def test_what_uv_was_told_wins(tmp_path: Path, home: dict[str, str]) -> None:
    layers(tmp_path)
    home |= {
        "UV_DEFAULT_INDEX": "corp=https://uv.example/simple",
        "UV_INDEX": "https://x.example/s y=https://y.example/s",
        "UV_FIND_LINKS": "/w1,https://w.example/",
        "UV_HTTP_TIMEOUT": "99",
    }
    got = read_pip_settings(home)
    assert got.index_url == "https://uv.example/simple"
    assert got.extra_index_urls == ("https://x.example/s", "https://y.example/s")
    assert got.find_links == ("/w1", "https://w.example/")
    assert "UV_HTTP_TIMEOUT" not in index_environment(got, home)
    assert uv_environment(got, home)["UV_HTTP_TIMEOUT"] == "99"


def test_a_malformed_file_is_named(tmp_path: Path, home: dict[str, str]) -> None:
    path = write(tmp_path / "config/pip/pip.conf", "index-url = https://anna:pw@x.example\n")
    with pytest.raises(DataError) as caught:
        read_pip_settings(home)
    assert str(path) in caught.value.cause
    assert "pw" not in caught.value.render()


def test_credentials_go_by_environment_only() -> None:
    settings = PipSettings(index_url=SECRET, extra_index_urls=("https://bob@two.example/s",), find_links=("/w",))
    arguments = index_arguments(settings)
    assert arguments == [
        *("--index", "pip-extra-1=https://two.example/s", "--default-index", "pip=https://index.example/simple"),
        *("--index-strategy", "unsafe-best-match", "--find-links", "/w"),
    ]
    env = index_environment(settings, {})
    assert env["UV_INDEX_PIP_USERNAME"] == "anna"
    assert env["UV_INDEX_PIP_PASSWORD"] == "s3cr@t"
    assert env["UV_INDEX_PIP_EXTRA_1_USERNAME"] == "bob"
    assert secrets(settings) == {"anna", "s3cr@t", "bob"}
    assert "s3cr" not in repr(settings)


def test_find_links_with_a_password_is_not_an_argument() -> None:
    settings = PipSettings(find_links=("https://u:p@links.example/", "/w"))
    assert "links.example" not in " ".join(index_arguments(settings))
    assert index_environment(settings, {})["UV_FIND_LINKS"] == "https://u:p@links.example/"


def test_no_index_leaves_folders_only() -> None:
    settings = PipSettings(index_url="https://x.example/simple", no_index=True, find_links=("/w",))
    assert index_arguments(settings) == ["--no-index", "--find-links", "/w"]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("at https://anna:pw@x.example/simple/torch/", "at https://x.example/simple/torch/"),
        ("git+ssh://git@host.example/repo.git", "git+ssh://host.example/repo.git"),
        ("http://u:p@ss@x.example/", "http://x.example/"),
        ("https://x.example/a@b", "https://x.example/a@b"),
        ("name@domain no address", "name@domain no address"),
    ],
)
def test_redact(text: str, clean: str) -> None:
    assert redact(text) == clean


def test_split_credentials_unquotes() -> None:
    assert split_credentials(SECRET) == ("https://index.example/simple", "anna", "s3cr@t")
    assert split_credentials("/folder") == ("/folder", None, None)


def test_the_users_choices_that_would_change_the_answer_do_not_reach_uv() -> None:
    env = {"UV_TORCH_BACKEND": "auto", "UV_RESOLUTION": "lowest", "UV_CACHE_DIR": "/c", "PATH": "/bin", "UV_INDEX": "x"}
    got = uv_environment(PipSettings(cert="/ca.pem"), env)
    assert got == {"UV_CACHE_DIR": "/c", "PATH": "/bin", "UV_PYTHON_DOWNLOADS": "never", "SSL_CERT_FILE": "/ca.pem"}


def test_constraint_lines(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.txt", "# a note\ntorch<=2.14.1  # on disk\n\nPillow\n--no-binary x\na @ https://x.example/a\n"
    )
    settings = PipSettings(constraints=(str(file), str(tmp_path / "missing.txt")))
    assert read_constraints(settings) == ("torch<=2.14.1", "Pillow")


def test_the_default_index_is_the_librarys_own() -> None:
    """What is read from the library's source is what importing it gives, and reading imports nothing."""
    code = "import sys; from envforge.lock.settings import default_index as d; print(d(), 'pypi_simple' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    assert said == [PYPI_SIMPLE_ENDPOINT.rstrip("/"), "False"]
