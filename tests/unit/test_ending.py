"""A command that is stopped from outside takes what it started along and leaves no scratch files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A command of ours that runs a program as locking does, in a scratch folder.
_SCRIPT = """
import os, signal, sys, tempfile, typer
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup before the test runner would be inherited
from envforge.cli.run import run
from envforge.lock.runner import run_uv

app = typer.Typer()

@app.command()
def wait() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as scratch:
        run_uv([sys.argv[2]], env=dict(os.environ), cwd=scratch, timeout=60, uv="/bin/sh")

sys.exit(run(app, []))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_command_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "program"
    program.write_text(f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 60\n")
    places = tmp_path / "places"
    places.mkdir()
    command = subprocess.Popen([sys.executable, "-c", _SCRIPT, str(places), str(program)])
    while not (tmp_path / "pid").exists():
        assert command.poll() is None
        time.sleep(0.02)
    assert list(places.iterdir())
    command.send_signal(number)
    assert command.wait(30) == 128 + number
    assert not list(places.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_ignored_signal_stays_ignored() -> None:
    code = (
        "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from envforge.ending import ended_as_exit\n"
        "with ended_as_exit(): os.kill(os.getpid(), signal.SIGHUP)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ctrl_c_while_the_program_loads_is_no_traceback() -> None:
    program = (
        "import builtins\n"
        "real = builtins.__import__\n"
        "def load(name, *rest):\n"
        "    if name == 'envforge.cli.app': raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = load\n"
        "from envforge.cli import main; main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
