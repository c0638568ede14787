"""What is not NVIDIA's: the operating system, its C library, the machine's surroundings."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from envforge.host.facts import Engine, Record
from envforge.host.text import dotted, driver, first_line, number

MUSL = "musl"
_ARCHES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64", "armv8": "aarch64"}


@dataclass(frozen=True, slots=True)
class Module:
    """The loaded kernel module: version as printed, and whether it is of the open flavour (None: not told)."""

    version: str | None
    open: bool | None


def read_module(text: str) -> Module:
    """/proc/driver/nvidia/version: the first dotted number after "Module"; the line below it is the compiler's."""
    line = next((line for line in text.splitlines() if "module" in line.lower() and "gcc" not in line.lower()[:4]), "")
    line = line or next((line for line in text.splitlines() if "nvrm" in line.lower()), "") or first_line(text)
    tail = re.split(r"module", line[:400], maxsplit=1, flags=re.IGNORECASE)[-1]
    return Module(driver(dotted(tail)), "open kernel module" in line.lower() if line else None)


def read_os(text: str) -> str | None:
    """os-release as one word: "ubuntu22.04", "debian12", "arch"."""
    values = read_env(text)
    name = re.sub(r"[^a-z0-9._-]", "", values.get("ID", "").lower())
    version = re.sub(r"[^a-z0-9._-]", "", values.get("VERSION_ID", "").lower())
    return (name + version)[:60] or None


def read_glibc(text: str) -> str | None:
    """`getconf GNU_LIBC_VERSION`, the first line of `ldd --version`, or a bare number; the word musl stays a word."""
    if MUSL in text.lower():
        return MUSL
    line = first_line(text)
    found = re.findall(r"(?<![\w.-])\d{1,2}\.\d{1,3}(?:\.\d{1,3})?(?![\w-]|\.\d)", line, re.ASCII)
    return ".".join(found[-1].split(".")[:2]) if found else None


def read_arch(text: str) -> str | None:
    """`uname -m` in the spelling of wheel tags."""
    word = re.sub(r"[^a-z0-9_-]", "", first_line(text).lower())[:30]
    return _ARCHES.get(word, word) or None


def read_python(text: str) -> str | None:
    """ "Python 3.11.2" or "3.11" -> "3.11"."""
    found = re.search(r"(?<![\d.])(\d)\.(\d{1,2})(?![\d])", text, re.ASCII)
    return f"{found[1]}.{found[2]}" if found else None


def read_meminfo(text: str) -> int | None:
    """Total memory in MiB from /proc/meminfo."""
    found = re.search(r"^MemTotal:\s*(\d{1,15})\s*kB", text, re.MULTILINE | re.ASCII)
    return int(found[1]) // 1024 if found else None


def read_engine(text: str) -> Engine | None:
    """One line: `docker 27.1.1`, or `docker -` when the client is there and its server does not answer."""
    words = first_line(text).split()
    if not words or words[0] not in ("docker", "podman"):
        return None
    version = dotted(words[1]) if len(words) > 1 else None
    return Engine(words[0], version, version is not None)


def read_env(text: str) -> dict[str, str]:
    """KEY=VALUE lines, with or without `export` and quotes; anything else is passed over."""
    values = {}
    for line in text.splitlines():
        key, equals, value = line.strip().removeprefix("export ").partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            continue
        if value[:1] in ("'", '"'):
            try:
                value = "".join(shlex.split(value)[:1])
            except ValueError:
                value = value.strip("'\"")
        values[key] = value
    return values


def is_wsl(kernel: str, env: dict[str, str]) -> bool:
    """Windows' Linux kernel says so in its own version."""
    return "microsoft" in kernel.lower() or "WSL_DISTRO_NAME" in env


def is_container(record: Record, env: dict[str, str]) -> bool:
    """The probe's own finding, or variables that only container images and runtimes set."""
    word = first_line(record.get("container", "")).lower()
    if word:
        return word not in ("none", "no", "false", "0")
    return any(name in env for name in ("NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES"))


def l4t_release(record: Record, module: str | None, gpu_names: list[str]) -> str | None:
    """The L4T release of a Tegra host ("35.4.1", or "unknown" where only the kernel shows it); None elsewhere."""
    release = re.search(
        r"R(\d{2})\s*\(release\),\s*REVISION:\s*(\d{1,2}(?:\.\d{1,2})*)", record.get("nv_tegra_release", "")
    )
    if release:
        return f"{release[1]}.{release[2]}"
    # No desktop or data-centre driver of the last fifteen years has a branch below 100; L4T has nothing else.
    if module and (number(module) or 0) < 100:
        return module
    signs = (
        record.get("nv_tegra_release", "").strip(),
        re.search(r"tegra|buildbrain@mobile", record.get("proc_version", ""), re.IGNORECASE),
        re.search(r"buildbrain@mobile|tegra", record.get("proc_driver_nvidia_version", ""), re.IGNORECASE),
        any("(nvgpu)" in name.lower() for name in gpu_names),
    )
    return "unknown" if any(signs) else None
