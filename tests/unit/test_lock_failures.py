"""An index that misbehaves must not be taken for a fact about packages. Real uv, stand-in server (lock_index.py)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lock_index import StandIn, make_plan, quiet, settings_for

from envforge.errors import (
    ConflictError,
    DiskFullError,
    EnvforgeError,
    HashMismatchError,
    IndexUnreachableError,
    OutsideError,
)
from envforge.lock import (
    PipSettings,
    UvResult,
    explain_failure,
    install_command,
    make_lock,
    probe_availability,
    run_uv,
    write_lock,
)
from envforge.lock.runner import index_name, reason, tidy

DEFAULTS = {"2.6": "cu124"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "1")


@pytest.fixture
def index() -> StandIn:
    with StandIn() as stand_in:
        stand_in.add("simple", "numpy", "1.26.4")
        stand_in.add("simple", "torch", "2.6.0", "numpy")
        stand_in.add("whl/cu126", "torch", "2.6.0+cu126", "numpy")
        yield stand_in


def fails(index: StandIn, variant: str = "cu124", **options: float) -> EnvforgeError:
    settings = settings_for(index)
    misbehave, index.misbehave = index.misbehave, {}
    availability = probe_availability(variant, settings, defaults=DEFAULTS)
    index.misbehave = misbehave
    with pytest.raises(EnvforgeError) as caught:
        make_lock(make_plan({"torch": "2.6.0"}, variant), availability, settings, **options)
    return caught.value


@pytest.mark.parametrize("how", ["500", "503", "hang", "truncate", "garbage"])
@pytest.mark.parametrize(
    ("where", "variant", "name"),
    [("/simple/numpy/", "cu124", "the default index"), ("/whl/cu126/torch/", "cu126", "the PyTorch index")],
)
def test_a_broken_page_is_exit_3_and_names_the_index(
    index: StandIn, how: str, where: str, variant: str, name: str
) -> None:
    index.misbehave = {where: how}
    error = fails(index, variant)
    assert isinstance(error, IndexUnreachableError), error
    assert error.exit_code == 3
    assert name in error.cause
    assert index.url in error.cause
    assert error.hint


@pytest.mark.parametrize("how", ["404", "500", "truncate"])
def test_a_missing_or_cut_metadata_file_is_no_conflict(index: StandIn, how: str) -> None:
    index.misbehave = {"numpy-1.26.4-py3-none-any.whl.metadata": how}
    assert isinstance(fails(index), IndexUnreachableError)


@pytest.mark.parametrize("how", ["401", "403"])
def test_a_refused_login_is_not_a_missing_package(index: StandIn, how: str) -> None:
    index.misbehave = {"/simple/numpy/": how}
    error = fails(index)
    assert isinstance(error, IndexUnreachableError)
    assert error.id == "index-login"
    assert "credentials" in error.hint


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize("scheme", ["refused", "tls", "unknown-host"])
def test_no_connection(index: StandIn, scheme: str) -> None:
    url = {
        "refused": f"http://127.0.0.1:{closed_port()}/simple",
        "tls": f"{index.url}/simple".replace("http:", "https:"),
        "unknown-host": "http://index.invalid/simple",
    }[scheme]
    settings = PipSettings(index_url=url, torch_index=f"{index.url}/whl")
    availability = probe_availability("cu126", settings, defaults=DEFAULTS)
    assert any("the default index" in text for text in availability.warnings)
    with pytest.raises(IndexUnreachableError) as caught:
        make_lock(make_plan({"torch": "2.6.0"}), availability, settings)
    assert f"the default index ({url})" in caught.value.cause
    assert ("certificate" in caught.value.hint) == (scheme == "tls")


def test_the_time_for_everything_is_bounded(index: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "60")
    index.misbehave = {"/simple/numpy/": "hang"}
    error = fails(index, timeout=2.0)
    assert (error.id, error.exit_code) == ("index-timeout", 3)


def test_uv_ends_with_its_time(tmp_path: Path) -> None:
    """Also what it started: a build may have children of its own."""
    script = tmp_path / "uv"
    note = tmp_path / "pid"
    script.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {note}\nwait\n", encoding="utf-8")
    script.chmod(0o755)
    with pytest.raises(IndexUnreachableError):
        run_uv(["x"], env={"PATH": os.environ["PATH"]}, cwd=tmp_path, timeout=1.0, uv=script)
    pid = int(note.read_text())
    assert gone(pid)


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_ends_uv_too(tmp_path: Path) -> None:
    script, note = tmp_path / "uv", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho $$ > {note}\nexec sleep 60\n", encoding="utf-8")
    script.chmod(0o755)
    code = (
        "import os, sys; from envforge.lock import run_uv\n"
        f"run_uv(['x'], env=dict(os.environ), cwd={str(tmp_path)!r}, timeout=60, uv={str(script)!r})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        for _ in range(200):
            if note.exists() and note.read_text().strip():
                break
            time.sleep(0.05)
        time.sleep(0.5)  # starting a child is not one step: the signal must meet the wait, not the start
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert b"KeyboardInterrupt" in stderr
    assert gone(int(note.read_text()))


def test_a_build_that_fails_is_not_a_fact(index: StandIn) -> None:
    index.add_source("simple", "broken", "1", "raise SystemExit('cannot build here')\n")
    settings = settings_for(index)
    availability = probe_availability("cu124", settings, defaults=DEFAULTS)
    plan = make_plan({"torch": "2.6.0"}, "cu124", requests=("torch", "broken"))
    with pytest.raises(OutsideError) as caught:
        make_lock(plan, availability, settings)
    assert (caught.value.id, caught.value.exit_code) == ("build", 3)


def test_a_replaced_file_is_a_hash_mismatch(index: StandIn, tmp_path: Path) -> None:
    settings = settings_for(index)
    availability = probe_availability("cu124", settings, defaults=DEFAULTS)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    made = make_lock(make_plan({"torch": "2.6.0"}, "cu124", python=python), availability, settings)
    write_lock(made, tmp_path)
    index.misbehave = {"numpy-1.26.4-py3-none-any.whl": "other-bytes"}
    argv, env = install_command(tmp_path, settings, python=sys.executable, target=tmp_path / "site")
    env["UV_CACHE_DIR"] = str(tmp_path / "other-cache")
    result = run_uv(argv[1:], env=env, cwd=tmp_path, timeout=60)
    assert result.code != 0
    error = explain_failure(result, settings)
    assert isinstance(error, HashMismatchError), result.words
    assert error.exit_code == 3


def test_an_index_that_now_lists_another_hash_is_a_mismatch_too(index: StandIn, tmp_path: Path) -> None:
    settings = settings_for(index)
    availability = probe_availability("cu124", settings, defaults=DEFAULTS)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    made = make_lock(make_plan({"torch": "2.6.0"}, "cu124", python=python), availability, settings)
    write_lock(made, tmp_path)
    index.files["simple"]["numpy"].clear()
    index.add("simple", "numpy", "1.26.4", "other-contents")
    argv, env = install_command(tmp_path, settings, python=sys.executable, target=tmp_path / "site")
    env["UV_CACHE_DIR"] = str(tmp_path / "other-cache")
    result = run_uv(argv[1:], env=env, cwd=tmp_path, timeout=60)
    assert isinstance(explain_failure(result, settings), HashMismatchError), result.words


def test_missing_uv_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutsideError) as caught:
        run_uv(["--version"], env={}, cwd=tmp_path, timeout=5, uv=tmp_path / "no-uv")
    assert caught.value.id == "uv"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("error: failed to write\n  cause: No space left on device (os error 28)", DiskFullError),
        ("error: Failed to parse: `uv.toml`\n  cause: TOML parse error", OutsideError),
        ("error: No solution found when resolving dependencies\n  cause: Because x", ConflictError),
        (
            "error: Failed to download and build `x==1`\n  cause: No solution found when resolving: `setuptools`",
            OutsideError,
        ),
        (
            "error: Failed to download and build `x==1`\n  cause: Failed to fetch: `https://x.example/setuptools/`",
            IndexUnreachableError,
        ),
        ("  × No solution found when resolving dependencies:\n  ╰─▶ Because x", ConflictError),
        ("error: Failed to fetch: `https://x.example/y`\n  cause: invalid peer certificate", IndexUnreachableError),
    ],
)
def test_kinds_by_words(words: str, kind: type[EnvforgeError]) -> None:
    assert type(explain_failure(UvResult(2, "", tidy(words), 0.1), PipSettings())) is kind


def test_words_for_people() -> None:
    words = tidy(
        "warning: `a.whl` is missing an upload date\n"
        "\x1b[31merror\x1b[0m: No solution found when resolving dependencies\n"
        "  cause: Because the-plan depends on a==1 and https://u:pw@x.example fails,\n         no.\n\nhint: try\n"
    )
    assert reason(words) == "Because the plan needs a==1 and https://x.example fails,\nno."


def test_the_longest_address_names_the_index() -> None:
    settings = PipSettings(
        index_url="https://u:p@m.example/pypi",
        extra_index_urls=("https://m.example/pypi/own",),
        torch_index="https://t.example",
    )
    assert index_name("https://m.example/pypi/own/x/", settings) == "the extra index (https://m.example/pypi/own)"
    assert index_name("https://m.example/pypi/x/", settings) == "the default index (https://m.example/pypi)"
    assert index_name("https://t.example/cu126/torch/", settings) == "the PyTorch index (https://t.example)"
    assert index_name("https://files.example/a.whl", settings) == "the package index at https://files.example"
