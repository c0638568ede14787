"""Environment: which Python runs, is what the plan pins installed, is torch the right build, do the libraries load?"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from envforge.verify.layers import attention, device, host
from envforge.verify.record import Fail, Recorder, Skip
from envforge.verify.settings import Settings
from envforge.verify.stacks import open_stack
from envforge.verify.stacks.hf import HfStack

# Import names of distributions whose name differs; only what is pinned or needed is imported.
IMPORTS = {"scikit-learn": "sklearn", "pyyaml": "yaml", "pillow": "PIL", "flash-attn": "flash_attn"}
LIBRARIES = (
    "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "trl", "bitsandbytes", "triton",
    "xformers", "flash-attn", "torchvision", "torchaudio", "torchao", "mmengine", "sentencepiece",
)  # fmt: skip
SHM_MIB = 1024  # what NCCL and data-loader workers want; a container gets 64 unless told otherwise
SHM_FLOOR_MIB = 16


def run(settings: Settings, recorder: Recorder) -> None:
    """All checks of the layer; they are independent of each other where they can be."""
    stack = open_stack(settings)
    recorder.note("host", host.facts())
    python(recorder)
    pins(settings, recorder)
    caches(recorder)
    shared_memory(settings, recorder)
    torch: Any = None
    with recorder.check("torch") as check:
        torch = importlib.import_module("torch")
        check.figure(version=torch.__version__, cuda=torch.version.cuda, file_prefix=sys.prefix)
        check.say(f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    if torch is None:
        return
    device.build(settings, recorder, torch)
    device.device(settings, recorder, torch)
    framework(settings, recorder, stack)
    libraries(settings, recorder, stack.package)
    if settings.device == "cuda" and settings.grade == "full":
        device.driver(settings, recorder, torch)
        device.sm_list(recorder, torch)
        device.left_over(recorder)
    elif settings.gpu_plan:
        device.static_sm_list(settings, recorder, torch)
    device.memory(settings, recorder, torch)
    device.compiler(settings, recorder)
    device.quantiser(settings, recorder, torch)
    device.triton(settings, recorder, torch)
    attention.kernels(settings, recorder, torch)
    if not recorder.failed:
        stack.self_check(recorder)


def python(recorder: Recorder) -> None:
    """Which interpreter runs, and whether something outside the environment reaches into it."""
    with recorder.check("python") as check:
        here, first = Path(sys.prefix), shutil.which("python") or shutil.which("python3")
        check.figure(executable=sys.executable, prefix=sys.prefix, version=sys.version.split()[0], first_on_path=first)
        check.say(f"Python {sys.version.split()[0]} in {sys.prefix}")
        active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
        if active and Path(active).resolve() != here.resolve():
            check.warn(f"the active environment is {active}, this Python belongs to {sys.prefix}")
        elif first and Path(first).parent.parent.resolve() != here.resolve():
            check.say(f"{check.text} (`python` on the PATH is another: {first})")
        outside = [path for path in sys.path if ".local/lib" in path]
        if outside:
            check.warn(f"packages of the user's own folder are in sight ({outside[0]}): set PYTHONNOUSERSITE=1")
        if os.environ.get("LD_LIBRARY_PATH"):
            check.figure(ld_library_path=os.environ["LD_LIBRARY_PATH"])
            check.warn("LD_LIBRARY_PATH is set: libraries found there go before the ones in the wheels")


def canonical(version: str) -> str:
    """A version without its local part, normalised where `packaging` is there."""
    public = version.split("+")[0]
    try:
        from packaging.version import InvalidVersion, Version
    except ImportError:
        return public
    try:
        return str(Version(public))
    except InvalidVersion:
        return public


def installed(name: str) -> str | None:
    """The installed version of a distribution, None when it is not there."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def pins(settings: Settings, recorder: Recorder) -> None:
    """Every pin of the plan, and every line of the lock that applies here, is installed exactly."""
    with recorder.check("pins") as check:
        wanted: dict[str, str] = {}
        if settings.plan:
            wanted.update({str(name): str(version) for name, version in settings.plan["pins"].items()})
        if settings.lock:
            wanted.update(locked(Path(settings.lock)))
        if not wanted:
            raise Skip("no plan and no lock given")
        missing, other = [], []
        for name, version in sorted(wanted.items()):
            found = installed(name)
            if found is None:
                missing.append(f"{name}=={version}")
            elif canonical(found) != canonical(version):
                other.append(f"{name}: {version} is pinned, {found} is installed")
        check.figure(pinned=len(wanted), missing=missing, different=other)
        if missing or other:
            lines = other + [f"{line} is not installed" for line in missing]
            raise Fail("; ".join(lines[:6]) + (f"; and {len(lines) - 6} more" if len(lines) > 6 else ""))
        check.say(f"{len(wanted)} pins installed exactly")
        want = settings.plan.get("python") if settings.plan else None
        if want and sys.version.split()[0].split(".")[:2] != str(want).split(".")[:2]:
            raise Fail(f"the plan is for Python {want}, this is {sys.version.split()[0]}")


def locked(path: Path) -> dict[str, str]:
    """name -> version of a requirements file with `name==version` lines; lines whose marker is false here left out."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)\s*(?:;([^\\]*))?", line)
        if match and _marker_holds(match.group(3)):
            found[re.sub(r"[-_.]+", "-", match.group(1)).lower()] = match.group(2)
    return found


def _marker_holds(marker: str | None) -> bool:
    if not marker or not marker.strip():
        return True
    try:
        from packaging.markers import InvalidMarker, Marker
    except ImportError:
        return False  # cannot tell: what cannot be told is not demanded
    try:
        return bool(Marker(marker.strip()).evaluate())
    except InvalidMarker:
        return False


def caches(recorder: Recorder) -> None:
    """The folders that the stack writes to can be written by this user, and the user has a name."""
    with recorder.check("caches") as check:
        folders = host.cache_folders()
        obstacles = {name: text for name, text in ((n, host.write_obstacle(f)) for n, f in folders.items()) if text}
        free = host.free_mib(str(folders["TMPDIR"]))
        check.figure(folders={name: str(folder) for name, folder in folders.items()}, free_mib=free)
        if obstacles:
            listed = "; ".join(f"{name} {text}" for name, text in obstacles.items())
            raise Fail(f"not writable by uid {os.getuid()}: {listed}; point these variables at a writable folder")
        check.say("cache folders are writable")
        import getpass

        try:
            getpass.getuser()
        except (KeyError, OSError):
            if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
                check.warn(f"uid {os.getuid()} has no name here: set TORCHINDUCTOR_CACHE_DIR, torch asks for the name")


def shared_memory(settings: Settings, recorder: Recorder) -> None:
    """/dev/shm is large enough for workers."""
    with recorder.check("shm") as check:
        size = host.size_mib(settings.shm)
        check.figure(mib=size)
        if size is None:
            raise Skip(f"{settings.shm} is not there")
        remedy = (
            "start the container with --shm-size=1g or --ipc=host (Kubernetes: a memory-backed emptyDir on /dev/shm)"
        )
        if size < SHM_FLOOR_MIB:
            raise Fail(f"{settings.shm} holds {size} MiB only: data-loader workers die with a bus error; {remedy}")
        check.say(f"{settings.shm} holds {size} MiB")
        if size < SHM_MIB:
            check.warn(f"below {SHM_MIB} MiB: fine for one process, too small for several GPUs; {remedy}")


def framework(settings: Settings, recorder: Recorder, stack: HfStack) -> None:
    """The stack's own package is imported first: some change the others as they load."""
    with recorder.check(f"import-{stack.package}") as check:
        check.figure(version=installed(stack.package))
        try:
            stack.start()
            importlib.import_module(stack.package)
        except Exception as error:
            if settings.grade == "static" and needs_device(error):
                raise Skip(f"{stack.package} wants a GPU to import: {str(error)[:200]}") from error
            raise
        check.say(f"{stack.package} {installed(stack.package)}")


def libraries(settings: Settings, recorder: Recorder, done: str) -> None:
    """What is installed of the usual libraries can be imported; one check each, so that each failure is seen."""
    versions = {}
    for name in LIBRARIES:
        version = installed(name)
        if version is None:
            continue
        versions[name] = version
        if name == done:
            continue
        with recorder.check(f"import-{name}") as check:
            check.figure(version=version)
            try:
                importlib.import_module(IMPORTS.get(name, name.replace("-", "_")))
            except Exception as error:
                if settings.grade == "static" and needs_device(error):
                    raise Skip(f"{name} {version} wants a GPU to import: {str(error)[:200]}") from error
                raise
            check.say(f"{name} {version}")
    for name in ("torch", "numpy", "huggingface-hub", "unsloth", "unsloth-zoo", "xtuner", "deepspeed"):
        version = installed(name)
        if version:
            versions[name] = version
    recorder.note("versions", versions)


def needs_device(error: BaseException) -> bool:
    """Whether an import failed only because there is no GPU."""
    text = str(error).lower()
    return any(
        word in text
        for word in ("no gpu", "no cuda", "0 active drivers", "libcuda", "torch accelerator", "cuda driver")
    )
