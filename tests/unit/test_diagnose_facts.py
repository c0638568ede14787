"""Facts from the log and the host, the matrix behind them, the numbers of out-of-memory messages, tracebacks."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable

import pytest

from envforge.diagnose import Report, diagnose, frames, memory
from envforge.diagnose.facts import Facts
from envforge.resolver.hosts import Host, HostGpu

TOO_OLD = "RuntimeError: CUDA driver version is insufficient for CUDA runtime version\n"


def read(log: str, **options: object) -> Report:
    return diagnose(io.BytesIO(log.encode()), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("log", "name", "value"),
    [
        ("| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2 |", "driver", "535.104.05"),
        ("Nvidia driver version: 550.54.15", "driver", "550.54.15"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.07  Fri", "driver", "570.133.07"),
        ("PyTorch version: 2.4.0+cu121", "torch", "2.4.0"),
        ("torch 2.12.0+cu130", "build", "cu130"),
        ("torch==2.9.0", "torch", "2.9.0"),
        ("    PyTorch 2.10.0+cu128 with CUDA 1208 (you have 2.11.0+cu130)", "torch", "2.11.0"),
        ("2.10.0+cpu None", "build", "cpu"),
        ("/srv/venv/lib/python3.12/site-packages", "python", "3.12"),
    ],
)
def test_read_from_the_log(log: str, name: str, value: str) -> None:
    assert read(log + "\n").facts[name] == value


def test_a_command_line_tells_what_is_wanted_not_what_is_there() -> None:
    assert "torch" not in read("$ pip install torch==2.9.0+cu130\n").facts


def test_options_win_over_the_log() -> None:
    log = "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |\ntorch 2.11.0+cu130\n" + TOO_OLD
    assert read(log).findings[0].confidence == "possible"  # the log's driver would do
    finding = read(log, driver="470.57.02").findings[0]
    assert finding.confidence == "certain"
    assert "580.65.06" in finding.cause and "470.57.02" in finding.cause


def test_fixes_name_the_variants_that_the_driver_runs() -> None:
    fixes = " ".join(read("torch 2.6.0+cu124\n" + TOO_OLD, driver="470.57.02").findings[0].fixes)
    assert "cu118" in fixes and "cu130" not in fixes


def test_host_file_gives_driver_and_gpu() -> None:
    host = Host("n1", "515.65.01", (HostGpu("Tesla T4", "7.5"),))
    finding = read("RuntimeError: Triton Error [CUDA]: device kernel image is invalid\n", host=host).findings[0]
    assert finding.confidence == "certain" and "515.65.01" in finding.cause
    arch = read("RuntimeError: FlashAttention only supports Ampere GPUs or newer.\n", host=host).findings[0]
    assert "Tesla T4" in arch.cause and "7.5" in arch.cause


def test_no_driver_is_known_from_the_host() -> None:
    report = read(TOO_OLD, host=Host("n1", None))
    assert report.findings[0].id == "driver-missing"
    assert report.facts["driver"] == "none"


def test_gpu_names_in_running_text() -> None:
    facts = Facts()
    for name in ("Tesla T4 with fp16", "NVIDIA GeForce RTX 4090", "NVIDIA Nonsense 1"):
        facts.take({"gpu": name}, 1, name)
    assert [gpu.sm for gpu in facts.gpus] == ["7.5", "8.9"]


def test_a_matrix_that_cannot_be_read_is_told_and_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    from envforge.errors import DataError

    def broken(*_: object, **__: object) -> None:
        raise DataError("torch.yaml:3: unknown field")

    monkeypatch.setattr("envforge.matrix.load.load_matrix", broken)
    report = read("torch 2.11.0+cu130\n" + TOO_OLD, driver="470.57.02")
    assert report.findings[0].id == "driver-too-old"
    assert "torch.yaml:3" in report.notes[0]


def new(want: str, total: str, free: str, own: str, unused: str, *, this: str = "", others: str = "") -> str:
    """PyTorch's message since 2.1; `others` holds "pid size" pairs."""
    told = "".join(f"Process {pid} has {size} memory in use. " for pid, size in re.findall(r"(\d+) (\S+ \wiB)", others))
    told += f"Including non-PyTorch memory, this process has {this} memory in use. " if this else ""
    return (
        f"CUDA out of memory. Tried to allocate {want}. GPU 0 has a total capacity of {total} of which {free} is free. "
        f"{told}Of the allocated memory {own} is allocated by PyTorch, and {unused} is reserved by PyTorch but "
        "unallocated."
    )


def old(want: str, total: str, own: str, free: str, reserved: str) -> str:
    """PyTorch's message before 2.1."""
    return (
        f"CUDA out of memory. Tried to allocate {want} (GPU 0; {total} total capacity; {own} already allocated; "
        f"{free} free; {reserved} reserved in total by PyTorch)"
    )


def window(text: str) -> Callable[[int, int], str]:
    return lambda before, after: text


TOO_LARGE = new("4.00 GiB", "23.64 GiB", "512.00 MiB", "22.40 GiB", "301.00 MiB")


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        (TOO_LARGE, {"capacity": "certain"}),
        (
            new("1.00 GiB", "39.40 GiB", "100.00 MiB", "30.00 GiB", "8.00 GiB", this="39.30 GiB"),
            {"fragmentation": "certain"},
        ),
        (
            new("20.00 MiB", "23.64 GiB", "5.00 MiB", "1.20 GiB", "10.00 MiB", this="1.60 GiB", others="7 22.00 GiB"),
            {"other-process": "certain"},
        ),
        # In a container the process names itself by its host pid.
        (
            new("2.00 GiB", "23.64 GiB", "1.00 GiB", "21.80 GiB", "200.00 MiB", others="7 22.60 GiB"),
            {"capacity": "certain"},
        ),
        (
            new("90.00 MiB", "8.00 GiB", "0 bytes", "7.13 GiB", "127.09 MiB"),
            {"capacity": "likely", "fragmentation": "possible"},
        ),
        (
            new("9.00 GiB", "79.15 GiB", "1.00 GiB", "47.00 GiB", "100.00 MiB", this="48.10 GiB", others="5 30.00 GiB"),
            {"other-process": "likely", "capacity": "likely"},
        ),
        (old("1.20 GiB", "15.78 GiB", "14.10 GiB", "301.44 MiB", "14.50 GiB"), {"capacity": "certain"}),
        (old("34.00 MiB", "23.70 GiB", "1.10 GiB", "20.00 MiB", "1.20 GiB"), {"other-process": "likely"}),
        ("CUDA out of memory.", {"unknown": ""}),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", {"unknown": ""}),
    ],
)
def test_numbers_decide(text: str, verdicts: dict[str, str]) -> None:
    assert dict(memory.judge(text, window(text)).verdicts) == verdicts


def test_a_wrapped_message_is_read_together() -> None:
    cut = TOO_LARGE.find("of which")
    log = f"torch.OutOfMemoryError: {TOO_LARGE[:cut]}\n    {TOO_LARGE[cut:]}\n"
    assert [finding.id for finding in read(log).findings] == ["oom-capacity"]


PLAIN = """\
  File "train.py", line 3, in <module>
    from trl import SFTTrainer
  File "/srv/venv/lib/python3.11/site-packages/trl/trainer/sft_trainer.py", line 9, in <module>
ImportError: boom from '/srv/venv/lib/python3.11/site-packages/transformers/__init__.py'"""
IPYTHON = """\
File /srv/venv/lib/python3.11/site-packages/peft/tuners/lora/model.py:33
     31 from x import y
ImportError: boom"""


def test_asking_package() -> None:
    assert frames.asking_package(PLAIN) == "trl"
    assert frames.asking_package(IPYTHON) == "peft"
    assert frames.asking_package('  File "unsloth/models/_utils.py", line 60\nImportError: x') == "unsloth"
    assert frames.asking_package('  File "train.py", line 60\nImportError: x') is None
    assert frames.asking_package("ImportError: x") is None


def test_json_shape() -> None:
    answer = read("RuntimeError: FlashAttention only supports Ampere GPUs or newer.\n").to_json()
    json.dumps(answer)
    assert answer["schema"] == 1
    (finding,) = answer["findings"]
    wanted = {"id", "title", "confidence", "owner", "retryable", "evidence", "cause", "fixes", "source"}
    assert wanted <= finding.keys()
    assert finding["evidence"] == [
        {"line": 1, "text": "RuntimeError: FlashAttention only supports Ampere GPUs or newer."}
    ]
