"""From a record to facts. Pure: the same record gives the same facts, and any text in any file gives some."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from envforge.host import system
from envforge.host.facts import FactSource, GpuFacts, HostFacts, Process, Record
from envforge.host.pci import read_lspci
from envforge.host.problems import Situation, find_problems
from envforge.host.record import clean
from envforge.host.smi import NVML_CODES, Lost, Smi, merge, read_smi, scan_messages
from envforge.host.text import branch, bus, driver

# (name as the driver prints it, also cut short; MiB) -> the compute capability, None where it is not known.
FindGpu = Callable[[str, int | None], str | None]


# L4T numbers below this are no drivers that wheels know, also those that look like one (540.3.0 of R36); later releases
# run the driver of the servers' branches.
FIRST_SHARED_BRANCH = 560


@dataclass(frozen=True, slots=True)
class Override:
    """What the user says instead of the machine: a driver version, or None for a host without GPU."""

    driver: str | None


@dataclass(frozen=True, slots=True)
class _Nvml:
    """nvml.json, read with suspicion. `code` is NVML's error when it did not start; `asked`: there is an answer."""

    asked: bool = False
    driver: str | None = None
    cuda: str | None = None
    cuda_error: str | None = None
    library: str | None = None
    error: str | None = None
    code: int | None = None
    gpus: tuple[GpuFacts, ...] = ()
    bus: tuple[tuple[int, str], ...] = ()
    lost: tuple[Lost, ...] = ()


def interpret(record: Record, override: Override | None = None, find_gpu: FindGpu | None = None) -> HostFacts:
    """What the record says.

    Args:
        record: name of a record file -> its text; missing names mean "not there".
        override: the user's word about the driver; it beats one recorded in ENVFORGE_DRIVER.
        find_gpu: fills in capabilities that old tools do not print.
    """
    record = {name: clean(text) for name, text in record.items()}
    env = system.read_env(record.get("env", ""))
    override = override or _recorded_override(env)
    module = system.read_module(record.get("proc_driver_nvidia_version", ""))
    sysfs = driver(record.get("sys_module_nvidia_version"))
    nvml = read_nvml(record.get("nvml.json", ""))
    smi = read_smi(
        record.get("nvidia-smi.txt", ""), record.get("nvidia-smi-query.csv", ""), record.get("nvidia-smi-L.txt", "")
    )
    for lost in nvml.lost:
        if all(row.where != lost.where for row in smi.lost):
            smi.lost.append(lost)
    if nvml.error and nvml.code is not None:
        scan_messages(nvml.error, smi)
        smi.flags.update(filter(None, ["nvml-failed" if nvml.code != 12 else None, NVML_CODES.get(nvml.code)]))
        smi.library = smi.library or nvml.library
    gpus = _gpus(nvml, smi, find_gpu)

    # On a mismatch the first two tell nothing, and the loaded module is the driver until the next reboot.
    candidates: list[tuple[FactSource, str | None]] = [
        ("nvml", nvml.driver),
        ("nvidia-smi", smi.driver),
        ("proc", module.version),
        ("sysfs", sysfs or smi.module),
    ]
    found = [(source, version) for source, version in candidates if version]
    source: FactSource = found[0][0] if found else "none"
    version = found[0][1] if found else None

    l4t = system.l4t_release(record, version, [gpu.name for gpu in gpus if gpu.name])
    if l4t and branch(version) < FIRST_SHARED_BRANCH:
        version = None
    word = nvml.cuda or (smi.cuda_word or "")
    cuda = word if word.replace(".", "", 1).isdigit() and word.isascii() and len(word) < 8 else None
    listed, devices = read_lspci(record.get("lspci.txt", ""))
    container = system.is_container(record, env)
    wsl = system.is_wsl(record.get("proc_version", ""), env)
    glibc = system.read_glibc(record.get("glibc", ""))
    situation = Situation(
        driver=version,
        module=module.version or sysfs or smi.module,
        module_open=module.open,
        module_loaded=bool(record.get("proc_driver_nvidia_version", "").strip())
        or bool(record.get("sys_module_nvidia_version", "").strip()),
        gpus=gpus,
        smi=smi,
        addresses=frozenset([*smi.bus.values(), *(address for _, address in nvml.bus)]),
        asked=nvml.asked or any(record.get(name, "").strip() for name in ("nvidia-smi.txt", "nvidia-smi-query.csv")),
        answered=nvml.driver is not None or any(gpu for gpu in gpus),
        nvml_started=nvml.driver is not None,
        smi_rc=_rc(record.get("nvidia-smi.rc")),
        nvml_rc=_rc(record.get("nvml.rc")),
        smi_text=record.get("nvidia-smi.txt", "") or record.get("nvidia-smi-query.csv", ""),
        cuda_word=_unreadable_cuda(nvml, smi) if cuda is None else None,
        pci_listed=listed,
        pci=tuple(devices),
        device_nodes=bool(re.search(r"nvidia\d", record["dev_nvidia"])) if "dev_nvidia" in record else None,
        nouveau="nouveau" in record.get("lspci.txt", "").lower(),
        env=env,
        wsl=wsl,
        container=container,
        l4t=l4t,
        musl=glibc == system.MUSL,
        overridden=override is not None,
    )
    facts = HostFacts(
        source=source,
        driver=version,
        cuda_max=cuda if gpus or version else None,
        gpus=gpus,
        os=system.read_os(record.get("os-release", "")),
        glibc=None if glibc == system.MUSL else glibc,
        arch=system.read_arch(record.get("arch", "")),
        python=system.read_python(record.get("python", "")),
        engine=system.read_engine(record.get("engine", "")),
        wsl=wsl,
        container=container,
        slurm=situation.slurm,
        memory_mib=system.read_meminfo(record.get("meminfo", "")),
        problems=find_problems(situation),
    )
    return apply_override(facts, override) if override else facts


# Problems that only say how the driver failed to show itself: pointless once the user has named it.
_ABOUT_THE_DRIVER = ("driver-missing", "driver-library-missing", "driver-unreachable", "container-without-gpu")


def apply_override(facts: HostFacts, override: Override) -> HostFacts:
    """The facts with the user's word in the place of the detected driver; `none` means a host without GPU."""
    if override.driver is None:
        kept = tuple(row for row in facts.problems if row.id == "musl-libc")
        return replace(facts, source="override", driver=None, cuda_max=None, gpus=(), problems=kept)
    return replace(
        facts,
        source="override",
        driver=override.driver,
        cuda_max=facts.cuda_max if facts.driver == override.driver else None,
        problems=tuple(row for row in facts.problems if row.id not in _ABOUT_THE_DRIVER),
    )


def _unreadable_cuda(nvml: _Nvml, smi: Smi) -> str | None:
    """What stands where a CUDA version should; None when the driver is too old to tell one at all (before 410)."""
    if nvml.driver:
        return nvml.cuda_error if branch(nvml.driver) >= 410 else None
    return smi.cuda_word


def _recorded_override(env: dict[str, str]) -> Override | None:
    word = env.get("ENVFORGE_DRIVER", "").strip()
    if word.lower() == "none":
        return Override(None)
    version = driver(word)
    return Override(version) if version == word and version else None


def _gpus(nvml: _Nvml, smi: Smi, find_gpu: FindGpu | None) -> tuple[GpuFacts, ...]:
    rows = {gpu.index: gpu for gpu in nvml.gpus}
    if rows:
        rows = {index: merge(gpu, smi.gpus[index]) if index in smi.gpus else gpu for index, gpu in rows.items()}
    else:
        rows = dict(smi.gpus)
    gpus = []
    for index in sorted(rows):
        gpu = rows[index]
        if gpu.name and gpu.sm is None and find_gpu:
            gpu = replace(gpu, sm=find_gpu(gpu.name, gpu.memory_mib))
        if gpu.name and _is_vgpu(gpu.name):
            gpu = replace(gpu, vgpu=True)
        gpus.append(gpu)
    return tuple(gpus)


def _is_vgpu(name: str) -> bool:
    """Profiles of virtual GPUs end in memory size and series: "GRID T4-8Q", "NVIDIA A100-3-20C"."""
    tail = name.rsplit("-", 1)[-1]
    return "-" in name and 2 <= len(tail) <= 4 and tail[:-1].isdigit() and tail[-1] in "QBAC"


def _rc(text: str | None) -> int | None:
    value = (text or "").strip()
    return int(value) if value.lstrip("-").isdigit() and value.isascii() and len(value) < 6 else None


def read_nvml(text: str) -> _Nvml:
    """The answer of the NVML child; anything that is not one gives an empty answer."""
    try:
        data = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        return _Nvml()
    gpus, addresses, lost = [], [], []
    rows = data.get("gpus")
    for row in rows if isinstance(rows, list) else []:
        index = _integer(row.get("index")) if isinstance(row, dict) else None
        if index is None or index < 0:
            continue
        address = bus(_words(row.get("bus")))
        if error := _words(row.get("error")):
            lost.append(Lost(address or f"index {index}", error))
            continue
        if address:
            addresses.append((index, address))
        processes = row.get("processes")
        gpus.append(
            GpuFacts(
                index,
                name=_words(row.get("name")),
                sm=_words(row.get("sm")),
                memory_mib=_integer(row.get("memory_mib")),
                memory_used_mib=_integer(row.get("memory_used_mib")),
                mig=row.get("mig") is True,
                vgpu=row.get("vgpu") is True,
                processes=tuple(
                    Process(pid, _words(process.get("name")), _integer(process.get("memory_mib")))
                    for process in (processes if isinstance(processes, list) else [])
                    if isinstance(process, dict) and (pid := _integer(process.get("pid"))) is not None
                ),
            )
        )
    cuda = _integer(data.get("cuda"))
    return _Nvml(
        asked=True,
        driver=driver(_words(data.get("driver"))),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda and 1000 <= cuda < 100_000 else None,
        cuda_error=_words(data.get("cuda_error")),
        library=driver(_words(data.get("library"))),
        error=_words(data.get("error")),
        code=_integer(data.get("code")),
        gpus=tuple(gpus),
        bus=tuple(addresses),
        lost=tuple(lost),
    )


def _words(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**12 else None
