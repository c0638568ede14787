"""Probes this machine and returns a record, the same files that the shell probe writes.

Nothing here interprets. Whatever may hang (NVML, nvidia-smi, a container engine) runs in a child with a time limit.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from envforge.host.children import Child, Outcome, run_children
from envforge.host.record import ENV_NAMES
from envforge.host.smi import QUERY

# Seconds. Together they stay under 20 when everything hangs: NVML and the engine first, then both forms of nvidia-smi.
NVML_LIMIT = 6.0
SMI_LIMIT = 10.0
ENGINE_LIMIT = 2.0

NVML_CHILD = Path(__file__).with_name("nvml_child.py")

_FILES = {
    "proc_driver_nvidia_version": "proc/driver/nvidia/version",
    "sys_module_nvidia_version": "sys/module/nvidia/version",
    "proc_version": "proc/version",
    "os-release": "etc/os-release",
    "nv_tegra_release": "etc/nv_tegra_release",
}
# Where nvidia-smi lies when it is not on PATH: WSL, and nodes that mount the driver (container-optimised systems).
_SMI_PLACES = ("/usr/lib/wsl/lib", "/usr/local/nvidia/bin", "/opt/nvidia/bin", "/home/kubernetes/bin/nvidia/bin")
_ENGINES = {
    "docker": ("docker", "version", "--format", "{{.Server.Version}}"),
    "podman": ("podman", "version", "--format", "{{.Client.Version}}"),
}


def gather(*, engine: bool = True, everything: bool = False, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """A record of this machine.

    Args:
        engine: also ask docker and podman (up to 2 s).
        everything: run nvidia-smi also when NVML has told all, as a record that is sent around should hold both.
        env: the environment instead of this process's own.
    """
    env = dict(os.environ if env is None else env)
    record = _read_files(Path("/"))
    # A variable that is set to nothing counts: an empty CUDA_VISIBLE_DEVICES hides every GPU.
    record["env"] = "".join(f"{name}={' '.join(env[name].splitlines())}\n" for name in ENV_NAMES if name in env)
    record["arch"] = platform.machine() + "\n"
    record["glibc"] = _libc() + "\n"
    record["python"] = f"{sys.version_info.major}.{sys.version_info.minor}\n"
    record["container"] = _container(Path("/"), env) + "\n"

    first: dict[str, Child] = {}
    if sys.executable:
        first["nvml"] = Child((sys.executable, str(NVML_CHILD)), NVML_LIMIT)
    if engine:
        first.update({name: Child(argv, ENGINE_LIMIT) for name, argv in _ENGINES.items() if shutil.which(argv[0])})
    outcomes = run_children(first, env)
    told_all = False
    if nvml := outcomes.pop("nvml", None):
        record["nvml.rc"] = f"{nvml.rc}\n"
        record["nvml.json"] = nvml.text
        told_all = nvml.rc == 0 and '"error"' not in nvml.text and '"driver": "' in nvml.text
    if line := _engine_line(outcomes):
        record["engine"] = line
    if everything or not told_all:
        record.update(_ask_smi(env))
    return record


def _ask_smi(env: Mapping[str, str]) -> dict[str, str]:
    program = find_smi(env)
    if program is None:
        return {}
    query = (program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    outcomes = run_children(
        {
            "plain": Child((program,), SMI_LIMIT),
            "query": Child(query, SMI_LIMIT),
            "list": Child((program, "-L"), SMI_LIMIT),
        },
        env,
    )
    return {
        "nvidia-smi.txt": outcomes["plain"].text,
        "nvidia-smi.rc": f"{outcomes['plain'].rc}\n",
        "nvidia-smi-query.csv": outcomes["query"].text,
        "nvidia-smi-L.txt": outcomes["list"].text,
    }


def find_smi(env: Mapping[str, str]) -> str | None:
    """The path of nvidia-smi, on PATH or in the places of systems that keep it elsewhere."""
    return shutil.which("nvidia-smi", path=env.get("PATH")) or next(
        (found for place in _SMI_PLACES if (found := shutil.which("nvidia-smi", path=place))), None
    )


def _engine_line(outcomes: Mapping[str, Outcome]) -> str | None:
    """The first engine that answers, else the first that is installed."""
    for name, outcome in outcomes.items():
        if outcome.rc == 0 and outcome.text.strip():
            return f"{name} {outcome.text.split()[0]}\n"
    return f"{next(iter(outcomes))} -\n" if outcomes else None


def _read_files(root: Path) -> dict[str, str]:
    record = {}
    for name, path in _FILES.items():
        if (text := _read(root / path)) is not None:
            record[name] = text
    if "os-release" not in record and (text := _read(root / "usr/lib/os-release")) is not None:
        record["os-release"] = text
    total = [line for line in (_read(root / "proc/meminfo") or "").splitlines() if line.startswith("MemTotal:")]
    if total:
        record["meminfo"] = total[0] + "\n"
    if (pci := list_pci(root / "sys/bus/pci/devices")) is not None:
        record["lspci.txt"] = pci
    with contextlib.suppress(OSError):
        record["dev_nvidia"] = "".join(f"{path.name}\n" for path in sorted((root / "dev").glob("nvidia*")))
    return record


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes()[:200_000].decode("utf-8", "replace")
    except OSError:
        return None


def list_pci(devices: Path) -> str | None:
    """The PCI devices in the shape of `lspci -nnk`, read from /sys so that no program is needed; None: no PCI bus."""
    try:
        entries = sorted(devices.iterdir())
    except OSError:
        return None
    lines = []
    for entry in entries:
        vendor, device, kind = (
            (_read(entry / name) or "").strip().removeprefix("0x") for name in ("vendor", "device", "class")
        )
        maker = "NVIDIA Corporation" if vendor == "10de" else "device"
        lines.append(f"{entry.name} class [{kind[:4]}]: {maker} [{vendor}:{device}]")
        try:
            lines.append(f"\tKernel driver in use: {(entry / 'driver').resolve(strict=True).name}")
        except OSError:
            continue
    return "".join(f"{line}\n" for line in lines)


def _libc() -> str:
    try:
        if text := os.confstr("CS_GNU_LIBC_VERSION"):
            return text
    except (ValueError, OSError):
        pass
    if any(Path("/lib").glob("ld-musl-*")):
        return "musl"
    return " ".join(platform.libc_ver()).strip()


def _container(root: Path, env: Mapping[str, str]) -> str:
    """Which kind of container this is, by the marks that each leaves; "none" where there is no mark."""
    if "KUBERNETES_SERVICE_HOST" in env:
        return "kubernetes"
    if "APPTAINER_CONTAINER" in env or "SINGULARITY_CONTAINER" in env:
        return "apptainer"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    control = _read(root / "proc/1/cgroup") or ""
    if any(word in control for word in ("docker", "kubepods", "containerd", "/lxc")):
        return "container"
    return env.get("container", "").strip() or "none"
