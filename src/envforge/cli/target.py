"""The target options that resolve, render, build, check and job share, and how they become hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from envforge.host import HostFacts
    from envforge.matrix.model import Matrix
    from envforge.resolver.hosts import Host

_PANEL = "Target (with none of these, this machine)"

HostOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--host",
        metavar="FILE|DIR",
        help="A host: what detect --json printed, or a record folder. Repeatable.",
        rich_help_panel=_PANEL,
    ),
]
FleetOption = Annotated[
    Path | None,
    typer.Option(
        "--fleet",
        metavar="FILE",
        help="Hosts: a YAML list (name, driver, gpus, count), kubectl get nodes -o json, scontrol show node, sinfo.",
        rich_help_panel=_PANEL,
    ),
]
DriverOption = Annotated[
    str | None,
    typer.Option(
        "--driver",
        metavar="V|none",
        help="Driver version; with --host or --fleet it replaces theirs. none: no GPU.",
        rich_help_panel=_PANEL,
    ),
]
GpuOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        metavar="NAME|sm_XY",
        help="GPU of the target, by product name or compute capability. Repeatable.",
        rich_help_panel=_PANEL,
    ),
]
GlibcOption = Annotated[
    str | None, typer.Option("--glibc", metavar="V", help="glibc version, for example 2.35.", rich_help_panel=_PANEL)
]
ArchOption = Annotated[
    str | None, typer.Option("--arch", metavar="ARCH", help="x86_64 or aarch64.", rich_help_panel=_PANEL)
]
PythonOption = Annotated[
    str | None, typer.Option("--python", metavar="X.Y", help="Python version.", rich_help_panel=_PANEL)
]
VariantOption = Annotated[
    str, typer.Option("--variant", metavar="cuXYZ|cpu|auto", help="Build of torch.", rich_help_panel=_PANEL)
]

UNCOVERED = "jetson-l4t"  # has a GPU, but none that the wheels have code for
MAX_HOST_BYTES = 5_000_000
MAX_LISTING_BYTES = 200_000_000  # a node of Kubernetes is some 15 kB of JSON
WAYS_ON = (
    'describe the target (--driver 550.54.15 --gpu "NVIDIA A100-SXM4-80GB", --host FILE or --fleet FILE), '
    "or ask for a CPU plan by name: --driver none, or --variant cpu"
)

_HOST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "driver"],
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$", "maxLength": 100},
        "driver": {"type": "string"},
        "gpus": {"type": "array", "items": {"type": "string"}},
        "count": {"type": "integer", "minimum": 1},
        "glibc": {"type": "string"},
        "arch": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
_HOSTS_SCHEMA = {"type": "array", "minItems": 1, "items": _HOST_SCHEMA}
_FLEET_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["hosts"],
    "properties": {"hosts": _HOSTS_SCHEMA},
}


@dataclass(frozen=True)
class Targets:
    """The target options as they were typed."""

    host: list[Path] | None = None
    fleet: Path | None = None
    driver: str | None = None
    gpu: list[str] | None = None
    glibc: str | None = None
    arch: str | None = None
    python: str | None = None
    variant: str = "auto"
    exclude: list[str] | None = None

    def given(self) -> tuple[str, ...]:
        """The options that were typed."""
        return tuple(f"--{name}" for name, value in vars(self).items() if value not in (None, [], "auto"))

    def read(self, matrix: Matrix | None = None) -> tuple[Host, ...]:
        """The hosts that are meant (see `read_targets`)."""
        return read_targets(self, matrix)


def read_targets(targets: Targets, matrix: Matrix | None = None) -> tuple[Host, ...]:
    """The described hosts, or this machine; every GPU with its compute capability, every name once.

    Raises:
        NoTargetError: nothing was described and this machine has no GPU that answers; the same for a recorded host.
        UsageError: malformed or unknown values, files that are no host files. DataError: faults of a fleet file.
    """
    from dataclasses import replace

    from envforge.errors import UsageError
    from envforge.resolver.hosts import known, make_host
    from envforge.settings import layered_matrix

    matrix = matrix or layered_matrix()
    _check_python(targets.python)
    _check_variant(targets.variant, matrix)
    gpus = [_check_gpu(name) for name in targets.gpu or ()]
    # Checked here so that a slip in them is told whichever way the hosts come.
    shape = make_host("target", targets.driver, gpus, targets.glibc, targets.arch or "x86_64")
    cpu = targets.variant == "cpu" or (targets.driver is not None and shape.driver is None)
    hosts: list[Host] = []
    exclude = targets.exclude or []
    if targets.host or targets.fleet:
        if gpus:
            raise UsageError(
                "--gpu describes a host of its own and cannot go with --host or --fleet",
                "name the GPU in the host or fleet file, or leave those options out",
            )
        hosts += [read_host(path, cpu=cpu, driver=targets.driver) for path in targets.host or ()]
        if targets.fleet:
            hosts, gone_nodes = _with_fleet(targets.fleet, hosts, targets.driver, cpu, exclude)
            exclude = [name for name in exclude if name not in gone_nodes]
        if targets.driver is not None:
            gone: dict[str, Any] = {"gpus": (), "cuda_max": None} if shape.driver is None else {"cuda_max": None}
            hosts = [replace(host, driver=shape.driver, **gone) for host in hosts]
    elif shape.has_gpu:
        hosts = [shape]
    elif cpu:
        hosts = [replace(shape, arch=shape.arch if targets.arch else _own_arch())]
    else:
        hosts = [_this_machine()]
    if targets.glibc is not None:
        hosts = [replace(host, glibc=targets.glibc) for host in hosts]
    if targets.arch is not None:
        hosts = [replace(host, arch=shape.arch) for host in hosts]
    named = _exclude(_unique(hosts), exclude)
    _check_known(named, matrix)
    return tuple(known(host, matrix) for host in named)


def _check_known(hosts: list[Host], matrix: Matrix) -> None:
    """GPU names that the matrix does not know, all at once (a single one is told by `known`)."""
    from envforge.errors import UsageError
    from envforge.matrix.gpus import find_gpu, nearest_gpus

    unknown: dict[str, list[str]] = {}
    for host in hosts:
        for gpu in host.gpus:
            if gpu.sm is None and find_gpu(matrix, gpu.name or "") is None:
                where = unknown.setdefault((gpu.name or "")[:60], [])
                where += [host.name] if host.name not in where else []
    if len(unknown) < 2:
        return
    lines = []
    for name, where in sorted(unknown.items()):
        near = ", ".join(nearest_gpus(matrix, name)) or "none is near"
        shown = ", ".join(where[:4]) + (f" and {len(where) - 4} more" if len(where) > 4 else "")
        lines.append(f"{name!r} of {shown} (nearest known: {near})")
    raise UsageError(
        "these GPUs are not in the matrix:\n" + "\n".join(f"  {line}" for line in lines),
        "correct the names, give a compute capability such as sm_86, or leave the hosts out with --exclude",
    )


def _with_fleet(
    path: Path, hosts: list[Host], driver: str | None, cpu: bool, exclude: list[str]
) -> tuple[list[Host], set[str]]:
    """The hosts of a fleet file or of a cluster's own listing, and the nodes of the listing that are left out: nobody
    has to describe those. A host file named like a node stands instead of it."""
    from dataclasses import replace

    from envforge.errors import NoTargetError
    from envforge.inventory import read_inventory, with_drivers

    text = _fleet_text(path)
    measured = {host.name: host for host in hosts}
    inventory = read_inventory(text, str(path), {*exclude, *measured})
    if inventory is None:
        return [*hosts, *read_fleet(path)], set()
    listed = {*inventory.skipped, *(host.name for host in (*inventory.hosts, *inventory.without_gpu))}
    gone = listed & set(exclude)
    hosts = [host for host in hosts if host.name not in gone]
    gpu, without = (tuple(h for h in rows if h.name not in gone) for rows in (inventory.hosts, inventory.without_gpu))
    inventory = replace(inventory, hosts=gpu, without_gpu=without)
    if cpu:
        return [*hosts, *gpu, *without], gone
    if not (gpu or hosts or gone):
        hint = (
            "GPU feature discovery labels them" if inventory.kind == "kubernetes" else "gres in slurm.conf names them"
        )
        raise NoTargetError(f"{path}: none of its {len(inventory.without_gpu)} nodes has a GPU", f"{hint}; {WAYS_ON}")
    nodes = {host.name for host in gpu}
    joined = with_drivers(inventory, measured, driver, str(path))
    return [*(host for host in hosts if host.name not in nodes), *joined], gone


def _fleet_text(path: Path) -> str:
    from envforge.errors import UsageError

    try:
        with path.open("rb") as file:
            raw = file.read(MAX_LISTING_BYTES + 1)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file", "give a fleet file") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})", "give a fleet file") from error
    if len(raw) > MAX_LISTING_BYTES:
        raise UsageError(f"{path} is larger than {MAX_LISTING_BYTES} bytes", "list the nodes that you mean")
    return raw.decode("utf-8", "replace")


def read_host(path: Path, *, cpu: bool = False, driver: str | None = None) -> Host:
    """A host from a file that `detect --json` wrote, or from a record folder; named after the file or folder.

    Args:
        path: the file or folder.
        cpu: a CPU plan was asked for by name, so a host without GPU is fine.
        driver: the user's word about the driver, for a record folder.

    Raises:
        UsageError: missing, unreadable, from another tool. NoTargetError: no GPU of that host answers.
    """
    import json
    from dataclasses import replace

    from envforge.cli.detect import find_facts
    from envforge.errors import UsageError
    from envforge.host import to_json
    from envforge.resolver.hosts import parse_host

    hint = "make it with: envforge detect --json > host.json"
    raw = b""
    try:
        if path.is_dir():
            data: Any = to_json(find_facts(driver, recorded=path))
        else:
            with path.open("rb") as file:
                raw = file.read(MAX_HOST_BYTES + 1)
            if len(raw) > MAX_HOST_BYTES:
                raise UsageError(f"{path} is larger than {MAX_HOST_BYTES} bytes: not a host file of envforge", hint)
            data = json.loads(raw)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such host file or record folder", hint) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})", hint) from error
    except (ValueError, RecursionError) as error:
        if b"NVIDIA-SMI" in raw:
            hint = "output of nvidia-smi goes into a folder as nvidia-smi.txt; then give the folder"
        raise UsageError(f"{path} is not a host file of envforge: it is no JSON", hint) from error
    name = path.absolute().name if path.is_dir() else path.absolute().stem
    host = replace(parse_host(data, str(path)), name=name or str(path))
    problems = _told(data.get("problems"))
    uncovered = any(text.startswith(UNCOVERED) for text in problems)
    if (uncovered or not host.has_gpu) and host.source != "override" and not cpu:
        _no_gpu(f"host {path}", problems)
    return host


def read_fleet(path: Path) -> tuple[Host, ...]:
    """The hosts of a fleet file: a YAML list, or a mapping with the list under `hosts`.

    Raises:
        DataError: every fault of the file, with line and field.
    """
    from envforge.errors import DataError, UsageError
    from envforge.matrix.strictyaml import load_checked, read_text
    from envforge.resolver.hosts import make_host

    text = read_text(path)
    data, lines = load_checked(text, str(path), {"if": {"type": "array"}, "then": _HOSTS_SCHEMA, "else": _FLEET_SCHEMA})
    where: tuple[str | int, ...] = () if isinstance(data, list) else ("hosts",)
    rows = data if isinstance(data, list) else data["hosts"]
    faults, hosts, seen = [], [], set()
    for number, row in enumerate(rows):
        line = lines.get((*where, number), 1)
        try:
            if row["name"] in seen:
                raise UsageError(f"the name {row['name']} appears twice")
            seen.add(row["name"])
            hosts.append(make_host(**{**row, "gpus": [_check_gpu(name) for name in row.get("gpus", ())]}))
        except UsageError as error:
            faults.append(
                f"{path}:{line}: hosts {number + 1}: {error.cause}" + (f"; {error.hint}" if error.hint else "")
            )
    if faults:
        raise DataError("\n".join(faults), "correct the lines named above")
    return tuple(hosts)


def _this_machine() -> Host:
    from dataclasses import replace

    from envforge.cli.detect import find_facts
    from envforge.host import to_json
    from envforge.resolver.hosts import parse_host

    facts = find_facts()
    uncovered = any(row.id == UNCOVERED for row in facts.problems)
    if facts.source != "override" and (uncovered or not (facts.gpus and facts.driver)):
        _no_gpu("this machine", _problems(facts))
    return replace(parse_host(to_json(facts), "this machine"), name="this-machine")


def _no_gpu(what: str, problems: Iterable[str]) -> NoReturn:
    from envforge.errors import NoTargetError

    given = "no target was given, and " if what == "this machine" else ""
    said = "".join(f"\n  - {text}" for text in problems)
    raise NoTargetError(f"{given}{what} has no GPU that CUDA could use" + (f":{said}" if said else ""), WAYS_ON)


def _problems(facts: HostFacts) -> list[str]:
    return [f"{row.id}: {row.text}" for row in facts.problems]


def _told(problems: Any) -> list[str]:
    """The problems of a host file, which anyone may have edited."""
    rows = problems if isinstance(problems, list) else []
    return [f"{row.get('id')}: {row.get('text')}" for row in rows if isinstance(row, dict)]


def _own_arch() -> str:
    import platform

    from envforge.host.system import read_arch
    from envforge.resolver.hosts import ARCHES

    own = read_arch(platform.machine())
    return own if own in ARCHES else "x86_64"


def _unique(hosts: list[Host]) -> list[Host]:
    """Names tell hosts apart in answers and in --exclude: a repeated one gets a number."""
    from dataclasses import replace

    seen: dict[str, int] = {}
    named = []
    for host in hosts:
        seen[host.name] = seen.get(host.name, 0) + 1
        number = seen[host.name]
        named.append(replace(host, name=f"{host.name}-{number}") if number > 1 else host)
    return named


def _exclude(hosts: list[Host], names: list[str]) -> list[Host]:
    from envforge.errors import UsageError

    known = [host.name for host in hosts]
    for name in names:
        if name not in known:
            raise UsageError(f"--exclude {name[:60]!r}: no such host", f"hosts: {', '.join(known)}")
    kept = [host for host in hosts if host.name not in names]
    if not kept:
        raise UsageError("--exclude leaves no host", "keep at least one")
    return kept


def _check_gpu(name: str) -> str:
    """A GPU as typed, stripped; shapes that can be neither a name nor a capability are refused with the reason."""
    import re

    from envforge.errors import UsageError
    from envforge.resolver.hosts import parse_sm

    text = name.strip()
    if parse_sm(text):
        return text
    if not text:
        raise UsageError("--gpu is empty", "give a product name, or a compute capability such as sm_86")
    if not text.isascii() or not text.isprintable() or len(text) > 100:
        raise UsageError(
            f"GPU {text[:40]!r} is no product name: it holds other than plain ASCII text, or is too long",
            'give it as nvidia-smi prints it, for example "NVIDIA A100-SXM4-80GB", or as sm_80',
        )
    if re.match(r"(sm|compute)[\s_-]*[\d.]*[a-z]*$", text, re.IGNORECASE) or re.fullmatch(
        r"\d{1,2}|[\d.]*\.[\d.]*", text
    ):
        raise UsageError(
            f"compute capability {text!r} is not of the form sm_86, sm_120 or 8.6",
            "nvidia-smi --query-gpu=compute_cap --format=csv prints it",
        )
    return text


def _check_python(text: str | None) -> None:
    import re

    from envforge.errors import UsageError

    if text is not None and not re.fullmatch(r"3\.([6-9]|1[0-9])", text):
        raise UsageError(
            f"python {text[:40]!r} is not of the form 3.11 (3.6 to 3.19)", "give the minor version, for example 3.12"
        )


def _check_variant(text: str, matrix: Matrix) -> None:
    from envforge.errors import UsageError

    known = sorted(
        {row.variant for row in matrix.torch_builds if row.variant != "cpu"}, key=lambda name: (len(name), name)
    )
    if text not in ("auto", "cpu") and text not in known:
        raise UsageError(f"unknown variant {text[:40]!r}", f"known: auto, cpu, {', '.join(known)}")
