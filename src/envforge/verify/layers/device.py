"""The device side of the environment layer: torch's build, driver, machine code, memory, kernels that really run."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from envforge.verify.layers import host
from envforge.verify.record import Fail, Recorder, Skip
from envforge.verify.settings import Settings
from envforge.verify.stacks.hf import four_bit_obstacle, version_of
from envforge.verify.weights import stored_dtype


def build(settings: Settings, recorder: Recorder, torch: Any) -> None:
    """torch's own CUDA and the local label are the plan's, not only its public version."""
    with recorder.check("torch-build") as check:
        label = torch.__version__.partition("+")[2]
        check.figure(version=torch.__version__, label=label, cuda=torch.version.cuda)
        if not settings.plan:
            check.say(f"torch {torch.__version__} (no plan to compare with)")
            return
        variant, cuda = str(settings.plan["variant"]), settings.plan.get("cuda")
        check.figure(plan_variant=variant, plan_cuda=cuda, plan_torch=settings.plan["pins"].get("torch"))
        where = (
            f"the plan wants torch {settings.plan['pins'].get('torch', '')}+{variant}, installed is {torch.__version__}"
        )
        if variant == "cpu":
            if torch.version.cuda is not None:
                raise Fail(f"{where} (torch.version.cuda is {torch.version.cuda})")
        elif torch.version.cuda is None:
            raise Fail(f"{where}, a build without CUDA: everything would run on the CPU")
        elif cuda and host.numbers(str(cuda))[:2] != host.numbers(torch.version.cuda)[:2]:
            raise Fail(f"{where} (CUDA {cuda} against torch.version.cuda {torch.version.cuda})")
        if label and label != variant:
            raise Fail(f"{where} (label {label} against {variant})")
        check.say(f"torch {torch.__version__} is the plan's {variant}")


def device(settings: Settings, recorder: Recorder, torch: Any) -> None:
    """The proof runs on the device that the plan is for."""
    with recorder.check("device") as check:
        usable = bool(torch.cuda.is_available())
        wants_gpu = settings.gpu_plan or (settings.plan is None and torch.version.cuda is not None)
        check.figure(cuda_available=usable, device=settings.device, wants_gpu=wants_gpu)
        if usable:
            count = torch.cuda.device_count()
            names = [torch.cuda.get_device_name(index) for index in range(count)]
            check.figure(gpus=names)
        if wants_gpu and settings.device != "cuda":
            if settings.grade == "static":
                raise Skip("no GPU here: the proof on the GPU is pending")
            raise Fail(
                "a full proof of a GPU environment cannot run on the CPU: "
                + ("the run was told to use the CPU" if usable else "torch sees no GPU here")
            )
        if settings.device == "cuda" and not usable:
            raise Fail("torch sees no GPU (driver, container started without GPUs, or CUDA_VISIBLE_DEVICES empty)")
        check.say(f"runs on {settings.device}" + (f": {', '.join(check.figures['gpus'])}" if usable else ""))


def driver(settings: Settings, recorder: Recorder, torch: Any) -> None:
    """The driver reaches the floor of the plan, or of torch's CUDA family."""
    with recorder.check("driver") as check:
        version = host.driver_version()
        target = (settings.plan or {}).get("target") or {}
        major = host.numbers(torch.version.cuda)[0]
        floor = target.get("driver_floor") or host.FAMILY_FLOOR.get(major)
        check.figure(driver=version, floor=floor, torch_cuda=torch.version.cuda, toolkit=_nvcc())
        if version is None:
            raise Skip("neither nvidia-smi nor /proc tells the driver's version")
        if floor and host.numbers(version) < host.numbers(str(floor)):
            raise Fail(
                f"driver {version} is below {floor}, which CUDA {torch.version.cuda} needs: install a torch build for "
                "an older CUDA, or a newer driver"
            )
        check.say(f"driver {version}, floor {floor}, torch's CUDA {torch.version.cuda}")


def _nvcc() -> str | None:
    text = host.run_quietly(["nvcc", "--version"])
    found = re.search(r"release (\d+\.\d+)", text or "")
    return found.group(1) if found else None


def covers(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Whether a build's code list holds code for a GPU: a cubin of the same major and minor <= the GPU's, or PTX <=."""
    for entry in architectures:
        kind, _, number = entry.partition("_")
        digits = re.match(r"\d+", number)
        if not digits:
            continue
        major, minor = int(digits.group()[:-1]), int(digits.group()[-1])
        if number.rstrip("0123456789") and (major, minor) != capability:
            continue  # an architecture-specific target (sm_90a) runs on that GPU only
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= capability:
            return True
    return False


def sm_list(recorder: Recorder, torch: Any) -> None:
    """torch holds code for every GPU in sight."""
    with recorder.check("sm-list") as check:
        architectures = list(torch.cuda.get_arch_list())
        here = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
        check.figure(build=architectures, gpus=[f"{major}.{minor}" for major, minor in here])
        bare = [f"sm_{major}{minor}" for major, minor in here if not covers(architectures, (major, minor))]
        if bare:
            raise Fail(
                f"torch {torch.__version__} holds no code for {', '.join(bare)}, only for {' '.join(architectures)}"
            )
        check.say(f"code for {', '.join(f'sm_{a}{b}' for a, b in here)} is in {' '.join(architectures)}")


def static_sm_list(settings: Settings, recorder: Recorder, torch: Any) -> None:
    """torch holds code for every GPU of the plan; asked of the build, so no GPU is needed."""
    with recorder.check("sm-list") as check:
        wanted = [str(sm) for sm in ((settings.plan or {}).get("target") or {}).get("sm") or []]
        flags = str(torch._C._cuda_getArchFlags() or "") if hasattr(torch._C, "_cuda_getArchFlags") else ""
        architectures = flags.split()
        check.figure(build=architectures, plan=wanted)
        if not wanted or not architectures:
            raise Skip("the plan names no GPU, or this build tells no code list")
        bare = [sm for sm in wanted if not covers(architectures, (int(sm.split(".")[0]), int(sm.split(".")[1])))]
        if bare:
            raise Fail(f"torch {torch.__version__} holds no code for {', '.join(bare)}, only for {flags}")
        check.say(f"code for {', '.join(wanted)} is in {flags}")


def left_over(recorder: Recorder) -> None:
    """Other processes that hold memory of the GPUs; told, never touched."""
    with recorder.check("gpu-processes") as check:
        found = host.gpu_processes()
        if found is None:
            raise Skip("nvidia-smi does not tell")
        check.figure(processes=found)
        if not found:
            check.say("no other process holds GPU memory")
        for row in found:
            age = row["age_seconds"]
            check.warn(
                f"pid {row['pid']} ({row['name']}, user {row['user'] or 'not visible'}"
                + (f", {age // 60} min old" if age is not None else "")
                + f") holds {row['memory_mib']} MiB; if it is yours and left over: kill {row['pid']}"
            )


def model_mib(settings: Settings) -> int | None:
    """MiB that training wants: weights in the run's precision, adapters with optimizer, activations at the cap."""
    if not settings.model:
        return None
    files = [*Path(settings.model).glob("*.safetensors"), *Path(settings.model).glob("pytorch_model*.bin")]
    weights = sum(file.stat().st_size for file in files)
    if not weights:
        return None
    # The CPU computes in four bytes a number, a GPU in two; what is stored may be either.
    stored = 4 if stored_dtype(settings.model) == "F32" else 2
    factor = (4 if settings.device == "cpu" else 2) / stored
    try:
        config = json.loads((Path(settings.model) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        tokens = settings.batch_size * settings.max_length
        # With checkpointing one hidden state per layer stays, and the logits exist three times in float32.
        activations = tokens * config["num_hidden_layers"] * config["hidden_size"] * 4
        activations += tokens * config["vocab_size"] * 4 * 3
    except (OSError, ValueError, KeyError):
        activations = 0
    return int((weights * factor * 1.1 + activations) / 2**20) + 512


def memory(settings: Settings, recorder: Recorder, torch: Any) -> None:
    """Free memory against an estimate for this model, MiB."""
    with recorder.check("memory") as check:
        needed = model_mib(settings)
        if settings.device == "cuda" and torch.cuda.is_available():
            free, total = (value >> 20 for value in torch.cuda.mem_get_info())
            check.figure(free_mib=free, total_mib=total)
        else:
            free = host.available_mib()
            check.figure(free_mib=free)
        check.figure(estimate_mib=needed)
        if free is None or needed is None:
            raise Skip("no model, or free memory is not told here")
        if free < needed:
            raise Fail(
                f"{free} MiB are free, about {needed} are needed for this model at max_length {settings.max_length}: "
                "lower max_length or the batch, or free memory"
            )
        check.say(f"{free} MiB free, about {needed} needed")


def compiler(settings: Settings, recorder: Recorder) -> None:
    """A C compiler and Python's headers, where Triton builds its launchers at run time."""
    with recorder.check("compiler") as check:
        found = next((path for path in map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang")) if path), None)
        header = Path(sysconfig.get_paths()["include"]) / "Python.h"
        check.figure(compiler=found, python_h=str(header) if header.exists() else None)
        lacking = [name for name, there in (("a C compiler", found), ("Python.h", header.exists())) if not there]
        if not version_of("triton"):
            raise Skip("Triton is not installed: nothing compiles at run time")
        if not lacking:
            check.say(f"{found} and {header.name}")
        elif settings.gpu_plan or settings.device == "cuda":
            raise Fail(f"{' and '.join(lacking)} not found: Triton cannot build its kernels' launchers")
        else:
            check.say("nothing needed on the CPU")
            check.warn(f"{' and '.join(lacking)} not found: torch.compile will not work")


def quantiser(settings: Settings, recorder: Recorder, torch: Any) -> None:
    """bitsandbytes quantises a matrix to 4 bits and back, with a bounded error."""
    with recorder.check("bitsandbytes") as check:
        obstacle = four_bit_obstacle(settings.device)
        if obstacle:
            raise Skip(obstacle)
        if settings.gpu_plan and settings.device != "cuda":
            raise Skip("no GPU here")
        functional = importlib.import_module("bitsandbytes.functional")
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(64, 64, generator=generator).to(settings.device)
        packed, state = functional.quantize_4bit(matrix, quant_type="nf4")
        back = functional.dequantize_4bit(packed, state)
        error = float((back.float() - matrix).abs().mean() / matrix.abs().mean())
        check.figure(relative_error=round(error, 4), packed_bytes=int(packed.numel() * packed.element_size()))
        if not 0 < error < 0.2:
            raise Fail(f"4-bit quantisation came back with a mean error of {error:.3g} (expected about 0.09)")
        check.say(f"quantises on {settings.device}, mean error {100 * error:.1f} %")


def triton(settings: Settings, recorder: Recorder, torch: Any) -> None:
    """Triton compiles a kernel: runs it on a GPU, else assembles it for the plan's GPUs."""
    with recorder.check("triton") as check:
        if not version_of("triton"):
            raise Skip("Triton is not installed")
        from envforge.verify.layers import kernel

        if settings.device == "cuda" and settings.grade == "full":
            kernel.launch(check, torch)
        elif settings.gpu_plan:
            kernel.assemble(check, [str(sm) for sm in (settings.plan or {})["target"].get("sm") or []])
        else:
            raise Skip("Triton's kernels are for GPUs")
