"""The preflight: one cause for each way in which a node cannot run an image, warnings for what may yet work."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from envforge import spec
from envforge.image.render import TEMPLATES

PROGRAM = TEMPLATES / "image" / "preflight.py"
SCHEMA = Path(spec.__file__).parent / "schemas" / "preflight.json"
FACTS = {
    "schema": 1, "variant": "cu126", "tier": "native", "driver_floor": "525.60.13", "sm": ["7.0", "8.0", "9.0"],
    "ptx": [], "planned_sm": ["8.0"], "address": "a" * 64,
}  # fmt: skip
A100 = {"index": 0, "name": "NVIDIA A100-SXM4-80GB", "sm": "8.0", "memory_mib": 81920, "memory_used_mib": 4,
        "mig": False, "processes": []}  # fmt: skip
ROOMY = {"shm_mib": 64000, "disk_mib": 500000, "memlock_kib": -1, "rdma": 0}


@pytest.fixture
def node(tmp_path: Path) -> Any:
    """Makes a record of a node; -> a function that runs the preflight on it and returns its JSON and exit code."""

    def look(
        gpus: list[dict[str, Any]] | None = None,
        driver: str = "550.54.15",
        facts: dict[str, Any] = FACTS,
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        files: dict[str, str] | None = None,
        **around: int,
    ) -> tuple[dict[str, Any], int]:
        record = tmp_path / "record"
        record.mkdir(exist_ok=True)
        if files is None:
            (record / "nvml.json").write_text(json.dumps({"driver": driver, "gpus": [A100] if gpus is None else gpus}))
        for name, text in {**(files or {}), **{k: str(v) for k, v in {**ROOMY, **around}.items()}}.items():
            (record / name).write_text(text)
        (tmp_path / "facts.json").write_text(json.dumps(facts))
        argv = [sys.executable, "-IS", str(PROGRAM), "--json", f"--facts={tmp_path / 'facts.json'}", *options]
        surroundings = {
            "PATH": os.environ["PATH"],
            "ENVFORGE_RECORDED": str(record),
            "ENVFORGE_NODE": "n7",
            **(env or {}),
        }
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=surroundings)
        assert done.stderr == ""
        answer = json.loads(done.stdout)
        jsonschema.validate(answer, json.loads(SCHEMA.read_text()))
        return answer, done.returncode

    return look


def test_a_good_node_passes_without_a_word_of_warning(node: Any) -> None:
    answer, code = node(env={"ENVFORGE_IMAGE_DIGEST": "sha256:" + "0" * 64})
    assert (answer["ok"], code, answer["cause"], answer["warnings"]) == (True, 0, None, [])
    assert (answer["node"], answer["driver"], answer["gpus"][0]["sm"]) == ("n7", "550.54.15", "8.0")
    assert answer["digest"] == "sha256:" + "0" * 64


def test_an_image_for_cpus_needs_no_gpu(node: Any) -> None:
    answer, code = node(facts={"variant": "cpu"}, files={})
    assert (answer["ok"], code) == (True, 0)


HELD = [{"pid": 4711, "name": "python", "memory_mib": 79000}]


@pytest.mark.parametrize(
    ("cause", "words", "arguments"),
    [
        ("driver-too-old", "470.57.02 is older than 525.60.13", {"driver": "470.57.02"}),
        ("no-gpu-code", "sm_120", {"gpus": [{**A100, "name": "RTX 5090", "sm": "12.0"}]}),
        ("leftover-processes", "pid 4711 python", {"gpus": [{**A100, "memory_used_mib": 79000, "processes": HELD}]}),
        ("gpu-memory", "not to be seen", {"gpus": [{**A100, "memory_used_mib": 79000}]}),
        ("gpu-memory", "51920 of 81920", {"gpus": [{**A100, "memory_used_mib": 30000}], "options": ("--own",)}),
        ("gpu-count", "1 GPU(s) are here, 8", {"options": ("--gpus=8",)}),
        ("gpu-lost", "GPU 1 does not answer", {"gpus": [A100, {"index": 1, "error": "NVML error 15"}]}),
        ("no-gpu", "no GPU is here", {"gpus": []}),
        ("no-gpu", "hides every GPU", {"env": {"CUDA_VISIBLE_DEVICES": ""}}),
        ("driver-hangs", "hangs", {"files": {"nvidia-smi.rc": "124\n"}}),
        ("driver-library-mismatch", "different versions",
         {"files": {"nvidia-smi.rc": "18", "nvidia-smi.txt": "Driver/library version mismatch\n"}}),
        ("no-gpu", "no GPU is here", {"files": {"nvidia-smi.rc": "127", "nvidia-smi.txt": "nvidia-smi: not found\n"}}),
        ("driver-broken", "NVML error 999", {"files": {"nvml.json": '{"error": "?", "code": 999}'}}),
        ("disk-full", "10 MiB are free", {"disk_mib": 10}),
        ("wrong-image", "made for bbb", {"options": ("--address=" + "b" * 64,)}),
    ],
)  # fmt: skip
def test_each_cause_is_named_with_a_fix(node: Any, cause: str, words: str, arguments: dict[str, Any]) -> None:
    answer, code = node(**arguments)
    assert code == 86
    assert answer["ok"] is False
    assert answer["cause"]["id"] == cause
    assert words in answer["cause"]["text"]
    assert len(answer["cause"]["fix"]) > 10


@pytest.mark.parametrize(
    ("warning", "words", "arguments"),
    [
        ("small-shm", "--shm-size 8g or --ipc=host; Kubernetes: a memory emptyDir", {"shm_mib": 64}),
        ("memlock", "ulimit -l unlimited", {"memlock_kib": 64, "rdma": 1, "options": ("--nodes=2",)}),
        ("disk-low", "2000 MiB", {"disk_mib": 2000}),
        ("shared-gpu", "1 other process", {"gpus": [{**A100, "memory_used_mib": 900, "processes": HELD}]}),
        ("unplanned-gpu", "H100", {"gpus": [{**A100, "name": "H100", "sm": "9.0"}]}),
    ],
)
def test_what_may_yet_work_is_a_warning(node: Any, warning: str, words: str, arguments: dict[str, Any]) -> None:
    answer, code = node(**arguments)
    assert code == 0
    (row,) = answer["warnings"]
    assert row["id"] == warning
    assert words in row["text"]


@pytest.mark.parametrize(
    ("arguments", "fine"),
    [
        ({"gpus": [{**A100, "sm": "8.6"}]}, True),  # a cubin of the same major and a lower minor
        ({"gpus": [{**A100, "sm": "12.0"}], "facts": {**FACTS, "ptx": ["9.0"], "planned_sm": []}}, True),
        # No JIT in a driver that is older than the toolkit, so PTX does not count there.
        (
            {"gpus": [{**A100, "sm": "12.0"}], "facts": {**FACTS, "ptx": ["9.0"], "planned_sm": [], "tier": "minor"}},
            False,
        ),
        ({"gpus": [{**A100, "sm": "7.5"}], "facts": {**FACTS, "sm": [], "planned_sm": ["8.0"]}}, False),
        ({"memlock_kib": 64, "rdma": 1}, True),  # one node
        ({"gpus": [{**A100, "mig": True, "memory_used_mib": 81000}]}, True),  # the slices have memory of their own
        ({"gpus": [{**A100, "memory_used_mib": 30000}]}, True),  # shared, and enough is left
        ({"gpus": [{**A100, "memory_used_mib": 30000}], "env": {"ENVFORGE_MIN_FREE_MIB": "60000"}}, False),
        ({"driver": "525.60.13"}, True),
    ],
)
def test_the_borders(node: Any, arguments: dict[str, Any], fine: bool) -> None:
    assert (node(**arguments)[1] == 0) is fine


def test_only_the_gpus_that_the_job_sees_count(node: Any) -> None:
    gpus = [A100, {**A100, "index": 1, "uuid": "GPU-abc", "memory_used_mib": 79000}]
    assert node(gpus=gpus)[1] == 86
    assert node(gpus=gpus, env={"CUDA_VISIBLE_DEVICES": "0"})[1] == 0
    assert node(gpus=gpus, env={"CUDA_VISIBLE_DEVICES": "GPU-abc"})[1] == 86


def test_a_record_of_nvidia_smi_serves_as_well(node: Any) -> None:
    query = "0, NVIDIA A100, rev 2, 470.57.02, 8.0, 81920, 5, Disabled, GPU-1, 00000000:07:00.0\n"
    answer, code = node(files={"nvidia-smi-query.csv": query, "nvidia-smi.rc": "0"})
    assert (code, answer["cause"]["id"], answer["driver"]) == (86, "driver-too-old", "470.57.02")
    table = "| Processes: |\n|    0   N/A  N/A      4711      C   python                79000MiB |\n"
    held = query.replace("470.57.02", "550.54.15").replace(", 5,", ", 79010,")
    answer, code = node(files={"nvidia-smi-query.csv": held, "nvidia-smi.txt": table})
    assert (code, answer["cause"]["id"]) == (86, "leftover-processes")
    assert "pid 4711 python 79000 MiB" in answer["cause"]["text"]


def test_modes_lines_and_files(node: Any, tmp_path: Path) -> None:
    bad = {"driver": "470.57.02"}
    answer, code = node(**bad, env={"ENVFORGE_PREFLIGHT": "warn"})
    assert (answer["ok"], code, answer["cause"]["id"]) == (True, 0, "driver-too-old")
    record, facts = str(tmp_path / "record"), str(tmp_path / "facts.json")

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-IS", str(PROGRAM), "--facts", facts, *words]
        return subprocess.run(argv, capture_output=True, text=True, check=False,
                              env={"ENVFORGE_RECORDED": record, "ENVFORGE_NODE": "n7", **env})  # fmt: skip

    told = run(f"--write={tmp_path}/{{node}}.json", "--no-such-option")
    assert told.returncode == 86
    assert told.stdout == ""
    first, line = told.stderr.splitlines()
    assert "--no-such-option is not known here" in first
    assert line.startswith("preflight n7: refused: driver 470.57.02 is older")
    assert " fix: " in line
    assert json.loads((tmp_path / "n7.json").read_text())["cause"]["id"] == "driver-too-old"
    assert run(ENVFORGE_PREFLIGHT="off").returncode == run(ENVFORGE_PREFLIGHT="done").returncode == 0
    assert run(ENVFORGE_PREFLIGHT="done").stderr == ""
    node()
    assert run("--quiet").stderr == ""
    assert run().stderr.startswith("preflight n7: ok, driver 550.54.15, 1 x NVIDIA A100-SXM4-80GB, 81916 MiB free")


@pytest.fixture
def module() -> ModuleType:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("preflight", PROGRAM)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Nvml:
    """Stands in for libnvidia-ml: one function per call that the preflight makes, filling what it is given."""

    def __init__(self, init: int = 0, second: int = 0) -> None:
        self.init, self.second = init, second

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        buffer.value = b"550.54.15"
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return self.second if index.value else 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 80 << 30, 1 << 30
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, now: Any, later: Any) -> int:
        return 3  # not supported: GPUs without MIG

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, rows: Any) -> int:
        count._obj.value = 1
        rows[0].pid, rows[0].used = 4711, 900 << 20
        return 0

    def nvmlSystemGetProcessName(self, pid: Any, buffer: Any, size: Any) -> int:
        buffer.value = b"python"
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        buffer.value = b"NVIDIA H100 80GB HBM3"
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        buffer.value = b"GPU-1"
        return 0


def test_nvml_is_read_into_the_shape_of_a_record(module: ModuleType) -> None:
    answer = module.ask_nvml(Nvml(second=15))
    assert answer["driver"] == "550.54.15"
    good, lost = answer["gpus"]
    assert good == {
        "index": 0, "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-1", "sm": "9.0", "memory_mib": 81920,
        "memory_used_mib": 1024, "mig": False, "processes": [{"pid": 4711, "name": "python", "memory_mib": 900}],
    }  # fmt: skip
    assert lost == {"index": 1, "error": "NVML error 15"}
    assert module.ask_nvml(Nvml(init=18))["code"] == 18


def test_a_driver_that_hangs_is_given_up(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(module, "ask_nvml", lambda: time.sleep(60))
    assert module.within(0.2)["code"] == 124
    monkeypatch.setattr(module, "ask_nvml", lambda: {"code": 0, "driver": "1", "gpus": []})
    assert module.within(5)["driver"] == "1"


def test_space_is_counted_where_something_can_be_written(module: ModuleType, tmp_path: Path) -> None:
    here = module.space(str(tmp_path))
    assert here > 0
    assert abs(module.space(str(tmp_path / "not" / "yet")) - here) < 1024


def test_it_loads_only_the_standard_library_and_little_of_that(module: ModuleType) -> None:
    code = f"import sys; sys.argv = ['x']; exec(open({str(PROGRAM)!r}).read().partition('if __name__')[0]); "
    code += "print(sorted(set(sys.modules) & {'argparse', 'subprocess', 'pathlib', 'typing', 'ctypes', 'tempfile'}))"
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
