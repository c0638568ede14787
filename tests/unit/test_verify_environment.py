"""The environment layer judged on stand-ins for torch and for the machine: each check passes and fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envforge.verify.layers import attention, device, environment, host, kernel, oom
from envforge.verify.record import FAIL, PASS, SKIP, WARN, Check, Recorder
from envforge.verify.settings import Settings


def torch_stub(
    version: str = "2.10.0+cu130",
    cuda: str | None = "13.0",
    usable: bool = True,
    archs: tuple[str, ...] = ("sm_80", "sm_90", "compute_90"),
    capability: tuple[int, int] = (8, 0),
) -> Any:
    """What the checks ask of torch, without torch."""
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        _C=SimpleNamespace(_cuda_getArchFlags=lambda: " ".join(archs)),
        cuda=SimpleNamespace(
            is_available=lambda: usable,
            device_count=lambda: 1,
            get_device_name=lambda index: "a GPU",
            get_arch_list=lambda: list(archs),
            get_device_capability=lambda index=0: capability,
            mem_get_info=lambda: (8 << 30, 16 << 30),
        ),
    )


def plan(variant: str = "cu130", cuda: str | None = "13.0", **target: Any) -> dict[str, Any]:
    """A plan as far as the layer reads one."""
    return {"variant": variant, "cuda": cuda, "pins": {"torch": "2.10.0"}, "target": {"sm": ["8.0"], **target}}


def one(run: Callable[[Recorder], None]) -> Check:
    """The only check that `run` makes."""
    recorder = Recorder("environment")
    run(recorder)
    assert len(recorder.checks) == 1
    return recorder.checks[0]


def test_cpu_build_in_place_of_the_plans_cuda_build_fails_and_shows_both() -> None:
    settings = Settings(plan=plan())
    check = one(lambda r: device.build(settings, r, torch_stub("2.10.0+cpu", None)))
    assert check.status == FAIL
    assert "2.10.0+cu130" in check.text and "2.10.0+cpu" in check.text


@pytest.mark.parametrize(
    ("version", "cuda", "variant", "plan_cuda", "status"),
    [
        ("2.10.0+cu130", "13.0", "cu130", "13.0", PASS),
        ("2.10.0", "13.0", "cu130", "13.0", PASS),  # the default index's wheels may carry no label
        ("2.10.0+cu128", "12.8", "cu130", "13.0", FAIL),
        ("2.10.0+cu130", "12.8", "cu130", "13.0", FAIL),
        ("2.10.0+cu126", "13.0", "cu130", "13.0", FAIL),
        ("2.10.0+cpu", None, "cpu", None, PASS),
        ("2.10.0+cu130", "13.0", "cpu", None, FAIL),
    ],
)
def test_torch_build(version: str, cuda: str | None, variant: str, plan_cuda: str | None, status: str) -> None:
    settings = Settings(plan=plan(variant, plan_cuda))
    assert one(lambda r: device.build(settings, r, torch_stub(version, cuda))).status == status


@pytest.mark.parametrize(
    ("grade", "place", "usable", "variant", "status"),
    [
        ("full", "cuda", True, "cu130", PASS),
        ("full", "cpu", False, "cu130", FAIL),  # a full proof of a GPU plan never runs on the CPU
        ("full", "cpu", True, "cu130", FAIL),  # not even when told to
        ("static", "cpu", False, "cu130", SKIP),
        ("full", "cpu", False, "cpu", PASS),
        ("full", "cuda", False, "cu130", FAIL),
    ],
)
def test_device(grade: str, place: str, usable: bool, variant: str, status: str) -> None:
    settings = Settings(plan=plan(variant, None), grade=grade, device=place)
    assert one(lambda r: device.device(settings, r, torch_stub(usable=usable))).status == status


def test_cuda_build_without_a_plan_wants_a_gpu() -> None:
    check = one(lambda r: device.device(Settings(), r, torch_stub(usable=False)))
    assert check.status == FAIL and "torch sees no GPU" in check.text


@pytest.mark.parametrize(
    ("archs", "capability", "covered"),
    [
        (["sm_80", "sm_90"], (8, 6), True),  # a cubin of the same major and an older minor
        (["sm_86"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),  # PTX is compiled on the spot
        (["compute_90"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_120"], (12, 0), True),
        (["sm_75", "sm_80", "sm_86", "sm_90"], (7, 0), False),
        ([], (8, 0), False),
    ],
)
def test_covers(archs: list[str], capability: tuple[int, int], covered: bool) -> None:
    assert device.covers(archs, capability) is covered


def test_sm_list_names_the_gpu_that_is_not_covered() -> None:
    check = one(lambda r: device.sm_list(r, torch_stub(archs=("sm_75", "sm_80"), capability=(12, 0))))
    assert check.status == FAIL and "sm_120" in check.text
    assert one(lambda r: device.sm_list(r, torch_stub())).status == PASS


def test_static_sm_list_is_asked_of_the_build() -> None:
    blackwell = Settings(plan={**plan(), "target": {"sm": ["8.0", "12.0"]}}, grade="static")
    check = one(lambda r: device.static_sm_list(blackwell, r, torch_stub(archs=("sm_80", "sm_90"))))
    assert check.status == FAIL and "12.0" in check.text
    ampere = Settings(plan=plan(), grade="static")
    assert one(lambda r: device.static_sm_list(ampere, r, torch_stub())).status == PASS
    assert one(lambda r: device.static_sm_list(ampere, r, torch_stub(archs=()))).status == SKIP


@pytest.mark.parametrize(
    ("driver", "cuda", "floor", "status"),
    [
        ("525.60.13", "12.4", None, PASS),
        ("525.53", "12.4", None, FAIL),
        ("470.82.01", "11.8", None, PASS),
        ("550.54.15", "12.4", "550.54.14", PASS),
        ("535.104.05", "12.4", "550.54.14", FAIL),
        ("9.0", "12.4", None, FAIL),  # numbers, not text
        (None, "12.4", None, SKIP),
    ],
)
def test_driver_floor(
    driver: str | None, cuda: str, floor: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "driver_version", lambda: driver)
    monkeypatch.setattr(device, "_nvcc", lambda: "12.6")
    settings = Settings(plan=plan(driver_floor=floor) if floor else None)
    check = one(lambda r: device.driver(settings, r, torch_stub(cuda=cuda)))
    assert check.status == status
    # Driver, toolkit and torch's CUDA stand side by side, whatever the answer is.
    assert (check.figures["driver"], check.figures["toolkit"], check.figures["torch_cuda"]) == (driver, "12.6", cuda)
    if status == FAIL:
        assert "torch build for an older CUDA" in check.text and "newer driver" in check.text


def test_left_over_processes_are_told_with_pid_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"pid": 4242, "name": "python", "memory_mib": 18000, "user": "ana", "age_seconds": 7200}
    monkeypatch.setattr(host, "gpu_processes", lambda: [row])
    check = one(device.left_over)
    assert check.status == WARN
    for part in ("4242", "ana", "120 min", "18000 MiB", "kill 4242"):
        assert part in check.text
    monkeypatch.setattr(host, "gpu_processes", list)
    assert one(device.left_over).status == PASS


def test_nvidia_smi_rows_become_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{os.getpid()}, python, 10\n1, /sbin/init, with comma, 512\n999999999, gone, [N/A]\n"
    monkeypatch.setattr(host, "run_quietly", lambda command: text)
    found = host.gpu_processes()
    assert found is not None and [row["pid"] for row in found] == [1, 999999999]
    assert found[0]["name"] == "/sbin/init,with comma" and found[0]["memory_mib"] == 512
    assert found[0]["user"] is not None and found[0]["age_seconds"] >= 0
    assert found[1]["user"] is None and found[1]["memory_mib"] is None


@pytest.mark.parametrize(("mib", "status"), [(8, FAIL), (64, WARN), (2048, PASS), (None, SKIP)])
def test_shared_memory(mib: int | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "size_mib", lambda folder: mib)
    check = one(lambda r: environment.shared_memory(Settings(), r))
    assert check.status == status
    if status in (FAIL, WARN):
        assert "--shm-size" in check.text


def test_caches_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HF_HOME", str(blocked / "hub"))  # below a file: refused for root as well
    check = one(environment.caches)
    assert check.status == FAIL and "HF_HOME" in check.text and "Traceback" not in check.text
    monkeypatch.setenv("HF_HOME", str(tmp_path / "new" / "hub"))
    assert one(environment.caches).status == PASS
    assert not (tmp_path / "new").exists()


def test_lock_lines(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.txt"
    lock.write_text(
        "# comment\n--index-url x\nnumpy==1.26.4 \\\n    --hash=sha256:aa\nTorch_Thing[extra]==2.0+cu118 ; "
        "python_version >= '3.0' \\\n    --hash=sha256:bb\ncolorama==0.4.6 ; sys_platform == 'win32'\n"
    )
    assert environment.locked(lock) == {"numpy": "1.26.4", "torch-thing": "2.0+cu118"}


def test_pins_pass_and_the_local_part_does_not_matter(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.txt"
    lock.write_text(f"pytest=={pytest.__version__}+local\n")
    settings = Settings(lock=str(lock))
    assert one(lambda r: environment.pins(settings, r)).status == PASS
    assert one(lambda r: environment.pins(Settings(), r)).status == SKIP


def test_another_python_than_the_plans_fails() -> None:
    settings = Settings(plan={"variant": "cpu", "pins": {"pytest": pytest.__version__}, "python": "3.1"})
    check = one(lambda r: environment.pins(settings, r))
    assert check.status == FAIL and "Python 3.1" in check.text


def test_triton_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "version_of", lambda name: "3.0.0")
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    check = one(lambda r: device.compiler(Settings(plan=plan()), r))
    assert check.status == FAIL and "a C compiler" in check.text
    assert one(lambda r: device.compiler(Settings(plan=plan("cpu")), r)).status == WARN
    monkeypatch.setattr(device, "version_of", lambda name: None)
    assert one(lambda r: device.compiler(Settings(plan=plan()), r)).status == SKIP


def test_memory_below_the_estimate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "model_mib", lambda settings: 20000)
    check = one(lambda r: device.memory(Settings(device="cuda"), r, torch_stub()))
    assert check.status == FAIL and "8192 MiB are free" in check.text
    monkeypatch.setattr(device, "model_mib", lambda settings: 2000)
    assert one(lambda r: device.memory(Settings(device="cuda"), r, torch_stub())).status == PASS


def test_a_foreign_environment_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/lib64")
    check = one(environment.python)
    assert check.status == WARN
    assert str(tmp_path) in check.text and "LD_LIBRARY_PATH" in check.text


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("Unsloth cannot find any torch accelerator? You need a GPU.", True),
        ("0 active drivers ([]). There should only be one.", True),
        ("operator torchvision::nms does not exist", False),
    ],
)
def test_import_errors_for_lack_of_a_gpu(text: str, device: bool) -> None:
    assert environment.needs_device(RuntimeError(text)) is device


class Numbers:
    """A tensor as far as the kernel check asks one."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> Any:
        return SimpleNamespace(all=lambda: self.value == other)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(("adds", "status"), [(1.0, PASS), (2.0, FAIL)])
def test_triton_kernel_is_launched_and_its_result_looked_at(
    adds: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for Triton and the GPU: the kernel adds what it is told to."""

    class Jit:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            def call(values: Numbers, *rest: object, **more: object) -> None:
                values.value += adds

            return call

    monkeypatch.setattr(kernel, "_kernel", Jit)
    monkeypatch.setattr(device, "version_of", lambda name: (3, 4))
    torch = SimpleNamespace(zeros=lambda size, device: Numbers(0.0), cuda=SimpleNamespace(synchronize=lambda: None))
    check = one(lambda r: device.triton(Settings(device="cuda"), r, torch))
    assert check.status == status, check.text


@pytest.mark.parametrize(
    ("name", "place", "capability", "status"),
    [
        ("flash-attn", "cpu", (8, 0), SKIP),
        ("flash-attn", "cuda", (7, 5), SKIP),  # FlashAttention 2 starts with Ampere
        ("flash-attn", "cuda", (8, 0), PASS),
        ("xformers", "cuda", (7, 5), PASS),
    ],
)
def test_attention_kernels_run_where_they_are_installed_and_can(
    name: str, place: str, capability: tuple[int, int], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "version_of", lambda package: (2, 8) if package == name else ())
    monkeypatch.setattr(attention, "flash_attn", lambda: "flash")
    monkeypatch.setattr(attention, "xformers", lambda: "xformers")
    ran: list[object] = []
    monkeypatch.setattr(attention, "agrees", lambda check, torch, function, where: ran.append(function))
    torch = torch_stub(capability=capability)
    check = one(lambda r: attention.kernels(Settings(device=place), r, torch))
    assert (check.id, check.status) == (f"environment.{name}-kernel", status)
    assert ran == ([name.partition("-")[0]] if status == PASS else [])


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (oom.Memory(2048, 100, 24000, 23000, 23500, 200), "the work is too large"),
        (oom.Memory(2048, 500, 24000, 18000, 23000, 900), "in pieces"),
        (oom.Memory(2048, 300, 24000, 6000, 6200, 100), "held by other processes"),
    ],
)
def test_out_of_memory_is_told_by_its_numbers(memory: oom.Memory, words: str) -> None:
    said = oom.sentence(memory)
    assert words in said and "2048 MiB asked" in said and "largest piece" in said


def test_out_of_memory_fails_the_check_and_keeps_the_error() -> None:
    """A stand-in for torch on a GPU that refuses."""

    class Refused(RuntimeError):
        pass

    cuda = SimpleNamespace(
        mem_get_info=lambda: (100 << 20, 24000 << 20),
        memory_snapshot=lambda: [{"blocks": [{"size": 200 << 20, "state": "inactive"}]}],
        memory_allocated=lambda: 23000 << 20,
        memory_reserved=lambda: 23500 << 20,
    )
    torch = SimpleNamespace(OutOfMemoryError=Refused, cuda=cuda)
    error = Refused("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
    recorder = Recorder("training")
    with recorder.check("steps") as check:
        oom.explain(check, torch, error)
    with recorder.check("other") as check:
        oom.explain(check, torch, RuntimeError("something else"))
    first, second = recorder.checks
    assert first.status == FAIL and first.figures["out_of_memory"]["asked"] == 2048
    assert "--data FILE" in first.text and "Tried to allocate 2.00 GiB" in first.error
    assert second.status == PASS


@pytest.mark.parametrize(
    ("place", "chosen", "status"), [("cuda", "cuda", PASS), ("cuda", "cpu", FAIL), ("cpu", "cpu", PASS)]
)
def test_what_unsloth_says_of_itself_is_recorded(
    place: str, chosen: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for unsloth; tests with the real one need its whole stack."""
    import sys

    from envforge.verify.stacks.unsloth import UnslothStack

    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(DEVICE_TYPE=chosen))
    check = one(UnslothStack(Settings(device=place, stack="unsloth")).self_check)
    assert check.status == status and check.figures["device_type"] == chosen
