"""Children that hang, flood or do not exist."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envforge.host.children import MAX_BYTES, Child, run_children

DEAF = "trap '' TERM HUP INT; echo started; sleep 300; sleep 300"


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_outcomes_keep_code_and_text_of_both_streams() -> None:
    found = run_children(
        {
            "fine": Child(("sh", "-c", "echo out; echo err >&2; exit 3"), 20),
            "missing": Child(("/nowhere/nvidia-smi",), 20),
            "locale": Child(("sh", "-c", "echo $LC_ALL ${LANGUAGE-unset} $SEEN"), 20),
            "input": Child(("cat",), 20),
        },
        {"PATH": os.environ["PATH"], "LANGUAGE": "de", "LC_ALL": "de_DE.UTF-8", "SEEN": "yes"},
    )
    assert (found["fine"].rc, sorted(found["fine"].text.split())) == (3, ["err", "out"])
    assert (found["missing"].rc, found["locale"].text) == (127, "C unset yes\n")
    assert (found["input"].rc, found["input"].text) == (0, "")


def test_a_file_that_is_no_program_is_told(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"\x00\x01not a program")
    program.chmod(0o755)
    assert run_children({"bad": Child((str(program),), 20)})["bad"].rc == 126


def test_a_deaf_child_is_left_and_its_whole_group_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 300 & echo $$ $! >{pids}; {DEAF}"
    found = run_children({"deaf": Child(("sh", "-c", script), 1.0), "quick": Child(("echo", "ok"), 1.0)})
    assert (found["deaf"].rc, found["deaf"].text, found["quick"].rc) == (124, "started\n", 0)
    waited = time.monotonic() + 20
    group = [int(pid) for pid in pids.read_text().split()]
    while any(alive(pid) for pid in group) and time.monotonic() < waited:
        time.sleep(0.05)
    assert not [pid for pid in group if alive(pid)]


def test_output_of_a_grandchild_that_keeps_the_pipe_open_does_not_hold_us() -> None:
    # The child ends at once; what it started in a session of its own would keep its pipe open for minutes.
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True); print('told')"
    found = run_children({"child": Child((sys.executable, "-c", code), 50)})
    assert (found["child"].rc, found["child"].text) == (0, "told\n")


def test_a_flood_is_cut() -> None:
    found = run_children({"flood": Child(("yes",), 50)})
    assert found["flood"].rc == 124 and len(found["flood"].text) == MAX_BYTES


def test_an_interrupt_kills_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def keep(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    def interrupt(self: object, timeout: float | None = None) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", keep)
    monkeypatch.setattr("selectors.DefaultSelector.select", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_children({"deaf": Child(("sh", "-c", DEAF), 50)})
    assert started[0].wait(20) == -9
