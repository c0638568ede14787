"""Asks NVML and prints one JSON object. Runs as a script in its own process, because a call into NVML may never return.

{"driver": "535.104.05", "cuda": 12020, "library": "535.104.05", "gpus": [{"index": 0, "name": "...", "sm": "8.0",
"memory_mib": 81920, "memory_used_mib": 4, "mig": false, "vgpu": false, "bus": "00000000:07:00.0", "processes":
[{"pid": 1, "name": "python", "memory_mib": 9}]}]}; a GPU that fails has {"index", "error"}. `cuda` is what libcuda says
(major * 1000 + minor * 10) or null with "cuda_error". When NVML does not start: {"error": "...", "code": 18}.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

MIB = 1024 * 1024


def main() -> int:
    """Prints the answer; 0 also when NVML is missing or fails, which the answer then says."""
    # Started by path, so this folder stands first in the search path and could hide a module of the same name.
    sys.path.pop(0)
    try:
        import pynvml as nvml
    except ImportError as error:
        say({"error": f"nvidia-ml-py cannot be imported ({error})", "code": None})
        return 0
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        say({"error": str(error), "code": error.value, "library": mapped_library()})
        return 0
    say(ask(nvml))
    return 0


def say(answer: dict[str, Any]) -> None:
    """The one line of output."""
    sys.stdout.write(json.dumps(answer) + "\n")


def ask(nvml: Any) -> dict[str, Any]:
    """Everything NVML tells; what one call refuses is null and does not stop the others."""

    def tell(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            value = call(*args, **options)
        except (nvml.NVMLError, AttributeError, ValueError):
            return None
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    answer: dict[str, Any] = {"driver": tell(nvml.nvmlSystemGetDriverVersion), "library": mapped_library(), "gpus": []}
    try:
        # _v2 asks libcuda itself, so it fails when libcuda is not there or is not the driver's.
        answer["cuda"] = nvml.nvmlSystemGetCudaDriverVersion_v2()
    except (nvml.NVMLError, AttributeError) as error:
        answer["cuda"], answer["cuda_error"] = None, str(error)
    for index in range(tell(nvml.nvmlDeviceGetCount) or 0):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            answer["gpus"].append({"index": index, "error": str(error)})
            continue
        capability = tell(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        memory = tell(nvml.nvmlDeviceGetMemoryInfo, handle, version=getattr(nvml, "nvmlMemory_v2", None))
        memory = memory or tell(nvml.nvmlDeviceGetMemoryInfo, handle)
        mig = tell(nvml.nvmlDeviceGetMigMode, handle)
        pci = tell(nvml.nvmlDeviceGetPciInfo, handle)
        bus = getattr(pci, "busId", None)
        row = {
            "index": index,
            "name": tell(nvml.nvmlDeviceGetName, handle),
            "sm": f"{capability[0]}.{capability[1]}" if capability else None,
            "memory_mib": memory.total // MIB if memory else None,
            "memory_used_mib": memory.used // MIB if memory else None,
            "mig": bool(mig and mig[0] == 1),
            "vgpu": tell(nvml.nvmlDeviceGetVirtualizationMode, handle) == 2,  # 2: the guest's side of a vGPU
            "bus": bus.decode("ascii", "replace") if isinstance(bus, bytes) else bus,
            "processes": [],
        }
        for process in tell(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []:
            used = process.usedGpuMemory
            row["processes"].append(
                {
                    "pid": process.pid,
                    "name": tell(nvml.nvmlSystemGetProcessName, process.pid),
                    # Where the driver does not count it (WSL, WDDM) the value is all ones.
                    "memory_mib": used // MIB if isinstance(used, int) and used < 1 << 60 else None,
                }
            )
        if row["name"] is None and row["memory_mib"] is None:
            row["error"] = "the GPU does not answer"
        answer["gpus"].append(row)
    return answer


def mapped_library() -> str | None:
    """The version in the file name of the libnvidia-ml that this process has loaded, all three parts of it."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
            found = re.search(r"libnvidia-ml\.so\.(\d+\.\d+(?:\.\d+)?)", maps.read())
    except OSError:
        return None
    return found[1] if found else None


if __name__ == "__main__":
    sys.exit(main())
