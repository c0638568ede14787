"""Record folders, the shell probe and the command. A fake nvidia-smi on PATH stands in for a GPU."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from envforge.cli import main
from envforge.errors import OutsideError, UsageError
from envforge.host import gather, interpret, probe_script, read_record, write_record
from envforge.host.record import ENV_NAMES, FILES

SHELLS = [
    pytest.param(name.split(), id=name, marks=pytest.mark.skipif(not shutil.which(name.split()[0]), reason="not here"))
    for name in ("dash", "busybox sh", "bash --posix")
]
SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) [ "$2" = --format=csv,noheader,nounits ] || exit 2
    echo "0, NVIDIA L4, 550.54.15, 8.9, 23034, 1, [N/A], GPU-0d5a6c31, 00000000:00:03.0" ;;
-L) echo "GPU 0: NVIDIA L4 (UUID: GPU-0d5a6c31)" ;;
"") echo "locale $LC_ALL"
    echo "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |"
    echo "a warning" >&2 ;;
*) exit 2 ;;
esac
"""
DEAF = "#!/bin/sh\ntrap '' TERM HUP INT\nsleep 300\nsleep 300\n"


@pytest.fixture(autouse=True)
def no_nvml(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a machine without libnvidia-ml, also where there is one."""
    child = tmp_path_factory.mktemp("nvml") / "child.py"
    child.write_text("""print('{"error": "NVML Shared Library Not Found", "code": 12, "library": null}')""")
    monkeypatch.setattr("envforge.host.live.NVML_CHILD", child)
    for name in ENV_NAMES:
        monkeypatch.delenv(name, raising=False)


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = SMI) -> None:
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "nvidia-smi").write_text(text)
    (bin_folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def probe(shell: list[str], *argv: str, cwd: Path, stdin: bool = False) -> subprocess.CompletedProcess[bytes]:
    script = cwd / "probe.sh"
    script.write_text(probe_script())
    command = [*shell, "-s", "--", *argv] if stdin else [*shell, str(script), *argv]
    given = probe_script().encode() if stdin else None
    return subprocess.run(command, cwd=cwd, input=given, capture_output=True, timeout=120)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_probe_writes_what_record_writes(
    shell: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    done = probe(shell, "by-shell", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, b"")
    ours = gather(everything=True)
    theirs = read_record(tmp_path / "by-shell")
    assert theirs["env"] == ours["env"] == "CUDA_VISIBLE_DEVICES=\nSLURM_JOB_ID=7\n" or (
        sorted(theirs["env"].split()) == sorted(ours["env"].split())
    )
    # The two may run different Pythons, and NVML cannot be asked from a shell.
    for record in (ours, theirs):
        for name in ("python", "nvml.json", "nvml.rc", "env"):
            record.pop(name, None)
    assert theirs == ours
    assert "a warning" in theirs["nvidia-smi.txt"] and "locale C" in theirs["nvidia-smi.txt"]
    assert interpret(theirs).gpus[0].name == "NVIDIA L4" and interpret(theirs).cuda_max == "12.4"
    assert "hunter2" not in "".join(theirs.values())
    assert not list(tmp_path.glob("*.tmp.*"))
    assert set(names(tmp_path / "by-shell")) <= set(FILES)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_probe_leaves_a_deaf_nvidia_smi_behind(
    shell: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, monkeypatch, DEAF)
    script = tmp_path / "short.sh"
    # The real limit of 10 s only makes this slower.
    script.write_text(probe_script().replace("limited 10 ", "limited 1 "))
    done = subprocess.run([*shell, str(script), "out"], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0
    record = read_record(tmp_path / "out")
    assert record["nvidia-smi.rc"] == "124\n" and "nvidia-smi-query.csv" not in record
    assert "driver-hung" in [row.id for row in interpret(record).problems]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_probe_streams_a_tar(shell: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch)
    holder = tmp_path / "tmp"
    holder.mkdir()
    monkeypatch.setenv("TMPDIR", str(holder))
    done = probe(shell, "-", cwd=tmp_path, stdin=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        files = {Path(name).name for name in tar.getnames()}
        assert all(name.startswith("envforge-record") for name in tar.getnames())
    assert {"nvidia-smi.txt", "nvidia-smi-query.csv", "glibc", "arch"} <= files
    assert not list(holder.iterdir())


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_probe_overwrites_nothing(shell: list[str], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    assert probe(shell, "full", cwd=tmp_path).returncode == 2
    assert probe(shell, "file", cwd=tmp_path).returncode == 2
    assert probe(shell, "missing/parent", cwd=tmp_path).returncode == 3
    assert probe(shell, "empty/", cwd=tmp_path).returncode == 0
    assert names(tmp_path / "full") == ["thesis.tex"] and read_record(tmp_path / "empty")
    assert names(tmp_path) == ["empty", "file", "full", "probe.sh"]


def test_a_deaf_nvidia_smi_does_not_hold_detect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_smi(tmp_path, monkeypatch, DEAF)
    monkeypatch.setattr("envforge.host.live.SMI_LIMIT", 1.0)
    assert call("detect", "--json", "--check") == 1
    assert "driver-hung" in capsys.readouterr().out


def test_record_then_recorded_gives_the_same_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_smi(tmp_path, monkeypatch)
    folder = tmp_path / "record"
    assert call("detect", "--record", str(folder), "--json") == 0
    first = capsys.readouterr()
    assert "record written" in first.err and json.loads(first.out)["driver"] == "550.54.15"
    assert call("detect", "--recorded", str(folder), "--json") == 0
    assert capsys.readouterr().out == first.out
    assert names(tmp_path) == ["bin", "record"]
    assert call("detect", "--record", str(folder)) == 2
    assert "not empty" in capsys.readouterr().err


def test_the_users_word_is_kept_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_smi(tmp_path, monkeypatch)
    monkeypatch.setenv("ENVFORGE_DRIVER", "none")
    assert call("detect", "--json") == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == []
    assert call("detect", "--driver", "580.95.05", "--record", str(tmp_path / "r"), "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["source"], first["driver"], len(first["gpus"])) == ("override", "580.95.05", 1)
    # The variable of this machine says nothing about a recorded one.
    assert call("detect", "--recorded", str(tmp_path / "r"), "--json") == 0
    assert json.loads(capsys.readouterr().out) == first


@pytest.mark.parametrize("word", ["535.104.05-1ubuntu", "12.2", "５３５.104.05", "", "latest", "535"])
def test_a_malformed_driver_is_one_clear_message(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("detect", "--driver", word) == 2
    said = capsys.readouterr()
    assert said.out == "" and "--driver" in said.err and "hint:" in said.err and "Traceback" not in said.err


def test_a_malformed_variable_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENVFORGE_DRIVER", "new")
    assert call("detect") == 2
    assert "ENVFORGE_DRIVER" in capsys.readouterr().err


def test_unusable_record_folders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report.txt").write_text("x")
    for name in ("missing", "file", "empty", "other", "a\0b"):
        with pytest.raises(UsageError, match=name.replace("\0", ".")):
            read_record(tmp_path / name)
    assert call("detect", "--recorded", str(tmp_path / "missing")) == 2
    assert call("detect", "--recorded", str(tmp_path), "--record", str(tmp_path / "new")) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_odd_entries_of_a_record_folder_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi.txt").mkdir()
    os.mkfifo(tmp_path / "env")
    (tmp_path / "nvidia-smi-query.csv").write_bytes(
        "\ufeff0, NVIDIA L4, 550.54.15, 8.9, 23034, 1, [N/A], x, 0:0:0\r\n".encode("utf-16")
    )
    (tmp_path / "lspci.txt").write_bytes(bytes(range(256)) * 50)
    facts = interpret(read_record(tmp_path))
    assert (facts.driver, facts.gpus[0].name) == ("550.54.15", "NVIDIA L4")


def test_garbage_gives_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(FILES):
        (tmp_path / name).write_bytes(bytes((number * 7 + i * i) % 256 for i in range(5000)))
    assert call("detect", "--recorded", str(tmp_path)) == 0
    assert call("detect", "--recorded", str(tmp_path), "--json") == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_record_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutsideError, match="No space left"):
        write_record({"arch": "x86_64"}, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_the_table_names_problem_and_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nvidia-smi-query.csv").write_text(
        "0, NVIDIA A100-SXM4-80GB, 535.104.05, 8.0, 81920, 4, Enabled, GPU-1, 00000000:07:00.0\n"
    )
    (tmp_path / "env").write_text("CUDA_VISIBLE_DEVICES=-1\n")
    (tmp_path / "os-release").write_text("ID=ubuntu\nVERSION_ID=22.04\n")
    assert call("detect", "--recorded", str(tmp_path), "--check") == 1
    said = capsys.readouterr().out
    for part in (
        "535.104.05",
        "NVIDIA A100-SXM4-80GB",
        "8.0",
        "4 of 81920 MiB",
        "on",
        "ubuntu22.04",
        "gpus-hidden",
        "fix",
    ):
        assert part in said
    assert call("detect", "--recorded", str(tmp_path)) == 0


def test_the_script_needs_nothing_and_speaks_of_every_query(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("detect", "--script") == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/sh\n") and "@" not in text.replace("$@", "")
    assert "--query-gpu=index,name,driver_version,compute_cap" in text
