"""Reads what nvidia-smi prints: the table with its banner, the query form, the list, and its many ways to fail."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from envforge.host.facts import GpuFacts, Process
from envforge.host.text import bus, driver, number

QUERY: tuple[str, ...] = (
    "index",
    "name",
    "driver_version",
    "compute_cap",
    "memory.total",
    "memory.used",
    "mig.mode.current",
    "uuid",
    "pci.bus_id",
)

MAX_LINE = 400  # no line of nvidia-smi is longer; keeps the patterns quick on garbage

# How nvidia-smi words a failure -> the flag that `problems` decides by.
_MESSAGES = {
    "mismatch": r"driver/library version mismatch|api mismatch",
    "no-devices": r"no devices (?:were )?found",
    "no-driver": r"couldn.?t communicate with the nvidia driver|driver (?:is )?not loaded|driver is not installed",
    "no-library": r"couldn.?t find libnvidia-ml|libnvidia-ml\.so\S{0,40}: cannot open|shared library not found",
    "no-program": r"nvidia-smi\S{0,9}: (?:command )?not found|nvidia-smi\S{0,9}: no such file",
    "no-permission": r"failed to initialize nvml: insufficient permissions",
    "blocked": r"gpu access blocked by the operating system",
    "nvml-unknown": r"failed to initialize nvml: unknown error",
    "nvml-failed": r"failed to initialize nvml",
    "lost": r"gpu is lost|fallen off the bus",
    "reset": r"requires? (?:a )?reset|reset required",
    "no-mig-devices": r"no mig devices found",
    "stub": r"is a stub library",
}
_FLAGS = {flag: re.compile(pattern, re.IGNORECASE) for flag, pattern in _MESSAGES.items()}
_LOST = re.compile(
    r"unable to determine the device handle for\s{0,4}(?:gpu)?\s{0,4}\d{0,4}?\s{0,4}:?\s{0,4}"
    r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\s{0,4}:?([^\n]{0,200})",
    re.IGNORECASE,
)
_BANNER_DRIVER = re.compile(r"\b(?:driver|kmd) version\s{0,40}:\s{0,40}([^\s|]{1,40})", re.IGNORECASE)
_BANNER_CUDA = re.compile(r"\bcuda(?: umd)? version\s{0,40}:\s{0,40}([^\s|]{1,40})", re.IGNORECASE)
_LIBRARY = re.compile(r"nvml library version\s{0,9}:\s{0,9}(\S{1,40})", re.IGNORECASE)
_API = re.compile(
    r"client has the version (\d+\.[\d.]*\d).{0,200}?kernel module has the version (\d+\.[\d.]*\d)", re.DOTALL
)
_ROW = re.compile(
    r"^\|\s*(\d{1,4})\s+(\S.*?)\s+(?:(?:on|off|n/a|wddm|tcc|mcdm|err!)\s*)?"
    r"\|\s*([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|n/a)\s",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"\|\s*(\d{1,9})\s*MiB\s*/\s*(\d{1,9})\s*MiB\s*\|", re.IGNORECASE)
_PROCESS = re.compile(
    r"^\|\s*(\d{1,4})\s+(?:\S+\s+\S+\s+)?(\d{1,9})\s+(C|G|C\+G|M\+C)\s+(\S.*?)\s+(\d{1,9}\s*MiB|N/A)\s*\|\s*$"
)
_LIST = re.compile(r"^GPU (\d{1,4}): (.+?)(?: \(UUID: (\S+)\))?\s*$")
_UNTOLD = re.compile(
    r"\[?(?:n/a|not supported|not available|no data|unknown.*|err!|insufficient permissions)?\]?$", re.I
)
_FAILED = re.compile(r"\[?(?:unknown error|err!)\]?$", re.I)


# NVML's own error numbers for the same failures.
NVML_CODES = {
    4: "no-permission",
    9: "no-driver",
    12: "no-library",
    15: "lost",
    16: "reset",
    17: "blocked",
    18: "mismatch",
    999: "nvml-unknown",
}


@dataclass(frozen=True, slots=True)
class Lost:
    """A GPU that the driver cannot reach: its PCI address or index as text, and the driver's words."""

    where: str
    why: str


@dataclass(slots=True)
class Smi:
    """What one or more outputs of nvidia-smi say.

    `cuda_word` is the banner's CUDA field as printed, also when it is no version ("N/A", "ERR!"). `library` is the
    user-space library's version where a failure names it, `module` the kernel module's. `bus` maps index -> address.
    """

    driver: str | None = None
    cuda_word: str | None = None
    gpus: dict[int, GpuFacts] = field(default_factory=dict)
    bus: dict[int, str] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    library: str | None = None
    module: str | None = None


def scan_messages(text: str, smi: Smi) -> None:
    """Failure messages, wherever they stand: nvidia-smi prints some to stdout, in the query form too."""
    smi.flags.update(flag for flag, pattern in _FLAGS.items() if pattern.search(text))
    for found in _LOST.finditer(text):
        _lose(smi, bus(found[1]) or found[1], found[2].strip().rstrip(".") or "no reason given")
    if library := _LIBRARY.search(text):
        smi.library = driver(library[1]) or smi.library
    if api := _API.search(text):
        smi.library, smi.module = smi.library or driver(api[1]), driver(api[2])


def scan_table(text: str, smi: Smi) -> None:
    """The plain output, of any age: banner, GPU rows, MIG column, processes."""
    if found := _BANNER_DRIVER.search(text):
        smi.driver = smi.driver or driver(found[1])
    if found := _BANNER_CUDA.search(text):
        smi.cuda_word = found[1]
    current: int | None = None
    errors = 0
    part = "gpus"
    for line in text.splitlines():
        line = line[:MAX_LINE]
        low = line.lower()
        if "mig devices:" in low:
            part, current = "mig", None
        elif "processes:" in low:
            part, current = "processes", None
        elif part == "processes":
            _scan_process(line, smi)
        elif part == "gpus" and (row := _ROW.match(line)):
            current, errors = int(row[1]), 0
            smi.gpus.setdefault(current, GpuFacts(current, name=row[2]))
            if address := bus(row[3]):
                smi.bus[current] = address
        elif current is not None and part == "gpus":
            _scan_second_line(line, current, smi)
            errors += line.upper().count("ERR!")
            if errors >= 3 and smi.gpus[current].memory_mib is None:
                _lose(smi, smi.bus.get(current, f"index {current}"), "every reading is ERR!")
                del smi.gpus[current]
                current = None


def _scan_second_line(line: str, index: int, smi: Smi) -> None:
    gpu = smi.gpus[index]
    if memory := _MEMORY.search(line):
        smi.gpus[index] = replace(gpu, memory_used_mib=int(memory[1]), memory_mib=int(memory[2]))
    elif re.search(r"\|\s*Enabled\*?\s*\|\s*$", line, re.IGNORECASE):
        smi.gpus[index] = replace(gpu, mig=True)


def _scan_process(line: str, smi: Smi) -> None:
    row = _PROCESS.match(line)
    if row is None or int(row[1]) not in smi.gpus:
        return
    gpu = smi.gpus[int(row[1])]
    process = Process(int(row[2]), row[4], number(row[5]))
    smi.gpus[int(row[1])] = replace(gpu, processes=(*gpu.processes, process))


def scan_query(text: str, smi: Smi) -> None:
    """The query form, one row per GPU. A name may hold commas, a header and units may be there, columns may lack."""
    columns = QUERY
    drivers: list[str] = []
    rows: dict[int, GpuFacts] = {}
    for line in text.splitlines():
        cells = [cell.strip().strip('"').strip() for cell in line[:MAX_LINE].split(",")]
        if cells[0].lower() == "index":
            columns = tuple(re.sub(r"\s*\[.*", "", cell).lower() for cell in cells)
            continue
        if not re.fullmatch(r"\d{1,4}", cells[0]) or len(cells) < 2:
            continue
        spare = len(cells) - len(columns)
        if spare > 0 and "name" in columns:
            at = columns.index("name")
            cells[at : at + spare + 1] = [", ".join(cells[at : at + spare + 1])]
        row = dict(zip(columns, cells, strict=False))
        index = int(cells[0])
        if address := bus(row.get("pci.bus_id")):
            smi.bus[index] = address
        if version := driver(row.get("driver_version")):
            drivers.append(version)
        if reason := _failed_row(row):
            _lose(smi, smi.bus.get(index, f"index {index}"), reason)
            continue
        capability = re.fullmatch(r"\d{1,2}\.\d{1,2}", row.get("compute_cap", ""))
        rows[index] = GpuFacts(
            index,
            name=_told(row.get("name")),
            sm=capability[0] if capability else None,
            memory_mib=number(row.get("memory.total")),
            memory_used_mib=number(row.get("memory.used")),
            mig=row.get("mig.mode.current", "").strip("[]").lower() == "enabled",
        )
    if drivers:
        # One driver serves all GPUs of a host; the value that most rows agree on outvotes a garbled one.
        smi.driver = max(drivers, key=drivers.count)
    for index, gpu in rows.items():
        table = smi.gpus.get(index)
        smi.gpus[index] = merge(gpu, table) if table else gpu


def _failed_row(row: dict[str, str]) -> str | None:
    """Why the GPU of this row is beyond reach, or None: single fields may be unreadable on a healthy GPU."""
    values = [value for key, value in row.items() if key != "index"]
    for value in values:
        if re.search(r"gpu is lost|requires? reset|fallen off", value, re.IGNORECASE):
            return value.strip("[]")
    failed = [value for value in values if _FAILED.match(value)]
    dead = _FAILED.match(row.get("name", "")) or _FAILED.match(row.get("memory.total", "")) or len(failed) > 1
    return failed[0].strip("[]") if failed and dead else None


def scan_list(text: str, smi: Smi) -> None:
    """`nvidia-smi -L`: whole names, which the table cuts short."""
    known = bool(smi.gpus or smi.lost)
    for line in text.splitlines():
        if row := _LIST.match(line[:MAX_LINE]):
            index = int(row[1])
            if known and index not in smi.gpus:
                continue  # the other outputs found it lost
            smi.gpus[index] = replace(smi.gpus.get(index, GpuFacts(index)), name=row[2])


def merge(first: GpuFacts, second: GpuFacts) -> GpuFacts:
    """What `first` does not tell is taken from `second`; a whole name beats one that the table cut."""
    cut = first.name is None or first.name.endswith("...")
    return GpuFacts(
        first.index,
        name=second.name if cut and second.name else first.name,
        sm=first.sm or second.sm,
        memory_mib=second.memory_mib if first.memory_mib is None else first.memory_mib,
        memory_used_mib=second.memory_used_mib if first.memory_used_mib is None else first.memory_used_mib,
        mig=first.mig or second.mig,
        vgpu=first.vgpu or second.vgpu,
        processes=first.processes or second.processes,
    )


def read_smi(plain: str, query: str, listing: str) -> Smi:
    """All that the outputs say together; any of them may be empty or garbage."""
    smi = Smi()
    plain, query, listing = (_text_lines(text) for text in (plain, query, listing))
    for text in (plain, query, listing):
        scan_messages(text, smi)
    scan_table(plain, smi)
    scan_query(query, smi)
    scan_list(listing or plain, smi)
    return smi


def _text_lines(text: str) -> str:
    """Without the lines that are no text: by chance one could pass for a GPU. A sign or two of an odd name may be."""
    return "\n".join(line for line in text.split("\n") if line.count("\ufffd") <= 2) if "\ufffd" in text else text


def _told(text: str | None) -> str | None:
    return None if text is None or _UNTOLD.match(text) else text


def _lose(smi: Smi, where: str, why: str) -> None:
    if all(row.where != where for row in smi.lost):
        smi.lost.append(Lost(where, why))
