"""The NVML child. The driver is stood in for by an object that has pynvml's functions: no GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from envforge.host import interpret
from envforge.host.nvml_child import ask

GIB = 1024**3


class FakeNvml:
    """Two GPUs: a whole one with a process, and one that is lost."""

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2
    cuda: int | None = 12020

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"535.104.05"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        if self.cuda is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA A100-SXM4-80GB"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 8, 0

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=80 * GIB, used=GIB)

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        return 1, 1

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=b"00000000:07:00.0")

    def nvmlDeviceGetVirtualizationMode(self, handle: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=7, usedGpuMemory=GIB), SimpleNamespace(pid=8, usedGpuMemory=2**64 - 1)]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        if pid == 8:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return b"python"


def facts_of(nvml: FakeNvml) -> Any:
    return interpret({"nvml.json": json.dumps(ask(nvml))})


def test_what_one_call_refuses_does_not_stop_the_others() -> None:
    facts = facts_of(FakeNvml())
    assert (facts.source, facts.driver, facts.cuda_max) == ("nvml", "535.104.05", "12.2")
    (gpu,) = facts.gpus
    assert (gpu.name, gpu.sm, gpu.memory_mib, gpu.memory_used_mib, gpu.mig, gpu.vgpu) == (
        *("NVIDIA A100-SXM4-80GB", "8.0", 81920, 1024),
        *(True, False),
    )
    assert [(row.pid, row.name, row.memory_mib) for row in gpu.processes] == [(7, "python", 1024), (8, None, None)]
    assert [(row.id, "index 1" in row.text) for row in facts.problems] == [("gpu-lost", True)]


def test_libcuda_that_does_not_answer_is_a_problem() -> None:
    nvml = FakeNvml()
    nvml.cuda = None
    facts = facts_of(nvml)
    assert facts.cuda_max is None and "libcuda-unreadable" in [row.id for row in facts.problems]


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (18, "driver-library-mismatch"),
        (4, "driver-no-permission"),
        (12, "driver-library-missing"),
        (9, "driver-unreachable"),
    ],
)
def test_error_numbers_decide_whatever_the_words_are(code: int, wanted: str) -> None:
    answer = json.dumps({"error": "?", "code": code, "library": None})
    facts = interpret({"nvml.json": answer, "sys_module_nvidia_version": "535.104.05"})
    assert [row.id for row in facts.problems] == [wanted]


def test_the_real_child_prints_one_object_on_any_machine(tmp_path: Path) -> None:
    # A module of that name in the working folder must not be taken for the real one.
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the working folder')")
    import envforge.host.nvml_child as child

    done = subprocess.run([sys.executable, child.__file__], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and ("error" in answer or "driver" in answer)
