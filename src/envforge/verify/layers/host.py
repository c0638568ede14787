"""Facts of the machine that the environment layer judges: driver, processes on the GPU, memory, caches."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Driver floor of each CUDA family, where minor-version compatibility starts. Source: NVIDIA, "CUDA Compatibility",
# table of minimum driver versions. A plan's own floor goes before this.
FAMILY_FLOOR = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def numbers(version: str) -> tuple[int, ...]:
    """ "550.54.15" -> (550, 54, 15)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def run_quietly(command: list[str], seconds: float = 10.0) -> str | None:
    """stdout of a command; None when it is not there, fails, or does not end in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def driver_version() -> str | None:
    """The NVIDIA driver: from nvidia-smi, else from /proc."""
    text = run_quietly(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if text and numbers(text.splitlines()[0]):
        return text.splitlines()[0].strip()
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def gpu_processes() -> list[dict[str, Any]] | None:
    """Processes that hold GPU memory: pid, name, MiB, user, age; None when that cannot be asked."""
    text = run_quietly(
        ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    )
    if text is None:
        return None
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 3 and parts[0].isdigit() and int(parts[0]) != os.getpid():
            memory = int(parts[-1]) if parts[-1].isdigit() else None
            row = {"pid": int(parts[0]), "name": ",".join(parts[1:-1]), "memory_mib": memory}
            found.append({**row, **owner_and_age(int(parts[0]))})
    return found


def owner_and_age(pid: int) -> dict[str, Any]:
    """User and age in seconds of a process, None where /proc does not show it (another container's)."""
    try:
        folder = Path(f"/proc/{pid}")
        uid = folder.stat().st_uid
        stat = (folder / "stat").read_text()
        ticks = int(stat[stat.rindex(")") + 2 :].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        age: float | None = round(uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return {"user": None, "age_seconds": None}
    try:
        import pwd

        name = pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        name = str(uid)
    return {"user": name, "age_seconds": age}


def available_mib() -> int | None:
    """Memory that a new process can take on this machine or in this control group, MiB."""
    values = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                values.append(int(line.split()[1]) // 1024)
    except OSError:
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            values.append((int(Path(limit).read_text()) - int(Path(used).read_text())) // 2**20)
        except (OSError, ValueError):
            continue  # "max", or no such controller
    return min(values) if values else None


def cache_folders() -> dict[str, Path]:
    """Where the stack writes: variable (or its default) -> folder."""
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    defaults = {
        "HF_HOME": cache / "huggingface",
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()),
        "MPLCONFIGDIR": Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config"),
        "TMPDIR": Path(tempfile.gettempdir()),
    }
    return {name: Path(os.environ.get(name) or folder) for name, folder in defaults.items()}


def write_obstacle(folder: Path) -> str:
    """Why nothing can be written below `folder` (which may not exist yet); "" when it can. Leaves nothing behind."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=str(existing)) as file:
            file.write(b"x")
    except OSError as error:
        return f"{folder}: {error.strerror or error} (at {existing})"
    return ""


def free_mib(folder: str) -> int | None:
    """Free space of the file system that holds `folder`, MiB; None when it is not there."""
    try:
        return shutil.disk_usage(folder).free // 2**20
    except OSError:
        return None


def size_mib(folder: str) -> int | None:
    """Size of a file system, MiB; None when it is not there."""
    try:
        return shutil.disk_usage(folder).total // 2**20
    except OSError:
        return None


def facts() -> dict[str, Any]:
    """What a receipt says about the machine; no name of it, no addresses."""
    libc = platform.libc_ver()
    found: dict[str, Any] = {
        "os": _os_release(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "glibc": libc[1] if libc[0] == "glibc" else None,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_available_mib": available_mib(),
        "driver": driver_version(),
        "uid": os.getuid() if hasattr(os, "getuid") else None,
        "container": _in_container(),
        "prefix": sys.prefix,
    }
    gpus = run_quietly(["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"])
    found["gpus"] = [line.strip() for line in (gpus or "").splitlines() if line.strip()]
    return found


def _os_release() -> str | None:
    try:
        rows = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    except OSError:
        return None
    return (rows.get("ID", "") + rows.get("VERSION_ID", "")).replace('"', "") or None


def _in_container() -> bool:
    return any(Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv", "/.singularity.d"))
