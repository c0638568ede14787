"""What a host is, and what a fleet of hosts allows: driver tiers, GPU code, glibc."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from envforge.errors import UsageError

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

ARCHES = ("x86_64", "aarch64")
_SAME = {"amd64": "x86_64", "arm64": "aarch64"}  # what Debian, Docker and Kubernetes call them
_DRIVER = re.compile(r"(\d{3,4})(\.\d{1,3}){1,2}")


@dataclass(frozen=True, slots=True)
class HostGpu:
    """One GPU of a host: product name (may be None when only its capability is known), capability "8.6", MiB."""

    name: str | None
    sm: str | None
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """One machine's facts as `detect --json` prints them; `count` such machines in a fleet."""

    name: str
    driver: str | None
    gpus: tuple[HostGpu, ...] = ()
    cuda_max: str | None = None
    glibc: str | None = None
    arch: str = "x86_64"
    os: str | None = None
    python: str | None = None
    count: int = 1
    labels: dict[str, str] = field(default_factory=dict)
    source: str = "override"

    @property
    def has_gpu(self) -> bool:
        """A driver or a GPU was named: a CUDA plan is wanted."""
        return self.driver is not None or bool(self.gpus)


@lru_cache(maxsize=4096)
def key(version: str) -> tuple[int, ...]:
    """Dotted numbers as a comparable tuple: drivers, CUDA versions, glibc, compute capabilities."""
    return tuple(int(part) for part in version.split("."))


def parse_driver(text: str) -> str | None:
    """A Linux driver version ("550.54.15", "470.86"), or None for the word `none`.

    Raises:
        UsageError: anything else, with the shape that is expected.
    """
    value = text.strip()
    if value.lower() == "none":
        return None
    if len(value) <= 20 and value.isascii() and _DRIVER.fullmatch(value):
        return value
    shown = value if len(value) <= 40 else value[:37] + "..."
    near = _DRIVER.search(value[:200]) if value.isascii() else None
    hint = "give it as nvidia-smi prints it, for example 550.54.15, or the word none"
    raise UsageError(
        f"driver version {shown!r} is not of the form 550.54.15", f"{hint}; meant {near[0]}?" if near else hint
    )


def parse_sm(text: str) -> str | None:
    """`sm_86`, `sm_120`, `sm_90a`, `compute_86`, `8.6` -> "8.6"; None when the text is not a capability at all."""
    match = re.fullmatch(r"(?:sm_?|compute_?)(\d{1,2})(\d)[af]?|(\d{1,2})\.(\d)", text.strip().lower())
    if not match:
        return None
    return f"{match[1]}.{match[2]}" if match[1] else f"{match[3]}.{match[4]}"


def make_host(
    name: str,
    driver: str | None,
    gpus: Iterable[str] = (),
    glibc: str | None = None,
    arch: str = "x86_64",
    count: int = 1,
    labels: Mapping[str, str] | None = None,
) -> Host:
    """A host from what people write: driver text, GPU names or sm_XY. GPU names get their capability in `known`.

    Raises:
        UsageError: malformed driver, glibc or arch.
    """
    if glibc is not None and not re.fullmatch(r"\d{1,2}\.\d{1,3}", glibc):
        raise UsageError(f"glibc {glibc[:40]!r} is not of the form 2.35", "ldd --version prints it")
    arch = _SAME.get(arch, arch)
    if arch not in ARCHES:
        raise UsageError(f"unknown architecture {arch[:40]!r}", f"known: {', '.join(ARCHES)}")
    rows = tuple(HostGpu(None, sm) if (sm := parse_sm(gpu)) else HostGpu(gpu, None) for gpu in gpus)
    parsed = parse_driver(driver) if driver is not None else None
    if parsed is None and rows and driver is not None:
        raise UsageError("GPUs are named but the driver is none", "leave the GPUs out for a CPU plan, or give a driver")
    return Host(name, parsed, rows, glibc=glibc, arch=arch, count=count, labels=dict(labels or {}))


def known(host: Host, matrix: Matrix) -> Host:
    """The same host with every GPU's capability filled in from the matrix.

    Raises:
        UsageError: a GPU name that the matrix does not know (lists the nearest ones).
    """
    from dataclasses import replace

    from envforge.matrix.gpus import find_gpu, nearest_gpus

    rows = []
    for gpu in host.gpus:
        if gpu.sm is None:
            row = find_gpu(matrix, gpu.name or "")
            if row is None:
                shown = (gpu.name or "")[:60]
                near = ", ".join(nearest_gpus(matrix, gpu.name or "")) or "none is near"
                raise UsageError(
                    f"GPU {shown!r} of host {host.name} is not in the matrix",
                    f"nearest known: {near}; or give its compute capability, for example sm_86",
                )
            gpu = replace(gpu, sm=row.sm)
        rows.append(gpu)
    return replace(host, gpus=tuple(rows))


def parse_host(data: Any, where: str) -> Host:
    """A host from `detect --json`.

    Raises:
        UsageError: the file is from another tool or lacks the keys that matter.
    """
    hint = "make it with: envforge detect --json > host.json"
    if not isinstance(data, dict) or data.get("schema") != 1 or "gpus" not in data or "driver" not in data:
        raise UsageError(f"{where} is not a host file of envforge", hint)
    try:
        gpus = tuple(
            HostGpu(
                row.get("name"),
                parse_sm(str(row["sm"])) if row.get("sm") else None,
                _int(row.get("memory_mib")),
                _int(row.get("memory_used_mib")),
                row.get("mig") is True,
            )
            for row in data["gpus"]
        )
        glibc = data.get("glibc")
        base = make_host(
            str(data.get("name") or where),
            str(data["driver"]) if data["driver"] is not None else None,
            glibc=str(glibc) if glibc and re.fullmatch(r"\d{1,2}\.\d{1,3}", str(glibc)) else None,
            arch=str(data.get("arch") or "x86_64"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{where} is damaged: {type(error).__name__} {error}", hint) from error
    return Host(
        base.name,
        base.driver,
        gpus,
        cuda_max=str(data["cuda_max"]) if data.get("cuda_max") else None,
        glibc=base.glibc,
        arch=base.arch,
        os=str(data["os"]) if data.get("os") else None,
        python=str(data["python"]) if data.get("python") else None,
        labels={str(k): str(v) for k, v in (data.get("labels") or {}).items()}
        if isinstance(data.get("labels"), dict)
        else {},
        source=str(data.get("source") or "recorded"),
    )


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def mixed(hosts: Iterable[Host], cpu: bool = False) -> str:
    """Why no plan can ever serve all of these, "" when one could: they need other wheels altogether."""
    hosts = list(hosts)
    arches = sorted({host.arch for host in hosts})
    if len(arches) > 1:
        return f"{' and '.join(arches)} hosts need other wheels of everything"
    if not cpu and len({host.has_gpu for host in hosts}) > 1:
        without = ", ".join(host.name for host in hosts if not host.has_gpu)
        return f"only some of the hosts have a GPU (none is known of {without})"
    return ""


def shipped_driver(matrix: Matrix, cuda: str) -> str | None:
    """The lowest driver that any release of this toolkit ("12.6") shipped: from there on the tier is `native`."""
    found = [row.driver for row in matrix.toolkits if row.cuda == cuda and row.driver]
    return min(found, key=key) if found else None


def family_floor(matrix: Matrix, major: int) -> str | None:
    """The driver floor of minor-version compatibility within a CUDA major."""
    return next((row.min_driver for row in matrix.families if row.major == major), None)


def covers(sm_list: Iterable[str], ptx: Iterable[str], gpu: str, jit: bool) -> str | None:
    """How a build's code runs on a GPU: "cubin", "ptx" (only with `jit`), or None.

    A cubin runs on the same major with an equal or higher minor; PTX on any later capability, compiled by the driver.
    """
    major, minor = key(gpu)
    for code in sm_list:
        have = key(code)
        if have[0] == major and have[1] <= minor:
            return "cubin"
    if jit and any(key(code) <= (major, minor) for code in ptx):
        return "ptx"
    return None
