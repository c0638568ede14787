"""What a cluster knows of its nodes -> hosts: Kubernetes node labels of NVIDIA's feature discovery, and Slurm.

Kubernetes: `kubectl get nodes -o json`. The labels nvidia.com/gpu.product, .count, .memory, .compute.major/minor and
nvidia.com/cuda.driver-version.full (older: cuda.driver.major/minor/rev) are read, kubernetes.io/arch beside them.
Slurm: `scontrol show node`, `sinfo -N -o "..."`, or one of them with --json; the GPUs are in the gres. Slurm knows no
driver, so those hosts come without one and the caller asks for it. Nodes without GPU are kept apart. Nothing here says
which glibc a node has: containers bring their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from envforge.errors import UsageError
from envforge.resolver.hosts import Host, HostGpu, parse_driver, parse_sm

Kind: TypeAlias = Literal["kubernetes", "slurm"]
MAX_NODES = 20_000
FEATURES = "slurm.features"  # label of a host: its node's features, for a job's --constraint
MAX_GPUS = 64  # in one node
_ARCHES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}
_HINT = {
    "kubernetes": "kubectl get nodes -o json, with NVIDIA's GPU feature discovery running",
    "slurm": 'scontrol show node, or sinfo -N -o "%N %G"',
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Inventory:
    """The nodes that have GPUs, as hosts (driver None where the source knows none), and how many nodes have none.
    `skipped`: nodes that cannot be read and need not be."""

    kind: Kind
    hosts: tuple[Host, ...]
    without_gpu: tuple[Host, ...] = ()
    skipped: tuple[str, ...] = ()


def read_inventory(text: str, where: str, known: Container[str] = ()) -> Inventory | None:
    """The nodes of a cluster listing; None when the text is no such listing (a fleet file, perhaps).

    known: nodes whose faults do not matter, because they are left out or described elsewhere.

    Raises:
        UsageError: it is one, but damaged; all faults of its nodes are named at once.
    """
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith(("{", "[")):
        data = _json(start)
        if data is None:
            return None
        if _is_kubernetes(data):
            return _collected("kubernetes", where, _kubernetes(data, where), _from_labels, known)
        rows = _slurm_json(data)
        return None if rows is None else _collected("slurm", where, rows, _from_slurm, known)
    if re.match(r"NodeName=\S", start):
        return _collected("slurm", where, _scontrol(start), _from_slurm, known)
    first = start.split("\n", 1)[0]
    if _sinfo_header(first):
        return _collected("slurm", where, _sinfo(start), _from_slurm, known)
    if re.match(r"PARTITION\s.*\bNODELIST\b|[A-Za-z0-9][\w.,\[\]-]*[\s|]+(\(null\)|gpu:\S+)\s*$", first):
        raise UsageError(f"{where}: sinfo without a header that names NODELIST and GRES", f"use: {_HINT['slurm']}")
    return None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _collected(
    kind: Kind,
    where: str,
    rows: Iterable[Mapping[str, Any]],
    make: Callable[[Mapping[str, Any], str], Host],
    known: Container[str],
) -> Inventory:
    """All nodes, each name once; faults are told together."""
    found: dict[str, Host] = {}
    skipped: list[str] = []
    faults: list[str] = []
    for number, row in enumerate(rows, 1):
        if number > MAX_NODES:
            raise UsageError(f"{where}: more than {MAX_NODES:,} nodes", "give the nodes that you mean")
        try:
            host = make(row, f"{where}: node {number}")
        except UsageError as error:
            name = _text(row.get("name") or _mapping(row.get("metadata")).get("name"))
            if name in known:
                skipped.append(name)
            else:
                faults.append(f"{error.cause}")
            continue
        found.setdefault(host.name, host)  # sinfo names a node once for each partition
    if faults:
        shown = [*faults[:20], *([f"and {len(faults) - 20} more"] if len(faults) > 20 else [])]
        raise UsageError("\n".join(shown), f"made with: {_HINT[kind]}")
    hosts = list(found.values())
    if not hosts and not skipped:
        raise UsageError(f"{where} lists no node", f"make it with: {_HINT[kind]}")
    gpu = tuple(host for host in hosts if host.gpus)
    return Inventory(kind, gpu, tuple(host for host in hosts if not host.gpus), tuple(skipped))


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _name(value: Any, where: str) -> str:
    name = _text(value)
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name[:40]!r} is no node name")
    return name


def _number(value: Any) -> int | None:
    """A small count as JSON or label text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < 10**9 else None
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()) else None


def _arch(value: Any, name: str) -> str:
    text = _text(value)
    if text and text not in _ARCHES:
        raise UsageError(f"node {name}: architecture {text[:40]!r} is none of {', '.join(sorted(_ARCHES))}")
    return _ARCHES.get(text, "x86_64")


def _gpus(gpu: HostGpu, count: int, name: str) -> tuple[HostGpu, ...]:
    if not 0 <= count <= MAX_GPUS:
        raise UsageError(f"node {name}: {count} GPUs in one node cannot be right")
    return (gpu,) * count


# --- Kubernetes ----------------------------------------------------------------------------------------------------


def _is_kubernetes(data: Any) -> bool:
    if not isinstance(data, dict):
        return False
    items = data.get("items")
    nodes = isinstance(items, list) and any(_mapping(i).get("kind") == "Node" for i in items[:50])
    listed = "apiVersion" in data and (nodes or (data.get("kind") == "List" and isinstance(items, list)))
    return data.get("kind") in ("Node", "NodeList") or listed


def _kubernetes(data: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    items = [data] if data.get("kind") == "Node" else data.get("items")
    if not isinstance(items, list):
        raise UsageError(f"{where}: a Kubernetes list without items", f"make it with: {_HINT['kubernetes']}")
    for item in items:
        if _mapping(item).get("kind", "Node") == "Node":
            yield _mapping(item)


def _from_labels(node: Mapping[str, Any], where: str) -> Host:
    meta = _mapping(node.get("metadata"))
    name = _name(meta.get("name"), where)
    labels = _mapping(meta.get("labels"))
    status = _mapping(node.get("status"))
    info = _mapping(status.get("nodeInfo"))
    arch = _arch(labels.get("kubernetes.io/arch") or info.get("architecture"), name)
    kept = {
        k: v for k, v in labels.items() if isinstance(k, str) and isinstance(v, str) and k.startswith("nvidia.com/")
    }
    capacity = _mapping(status.get("capacity"))
    offered = any(_number(v) for k, v in capacity.items() if isinstance(k, str) and k.startswith("nvidia.com/"))
    product = _text(labels.get("nvidia.com/gpu.product"))
    if not product and "nvidia.com/gpu.compute.major" not in labels:
        if offered:
            raise UsageError(f"node {name} offers GPUs but has no label nvidia.com/gpu.product")
        return Host(name, None, arch=arch, os=_text(info.get("osImage")) or None, source="kubernetes")
    mig = "-MIG-" in product or any(re.match(r"nvidia\.com/mig-.*\.count$", k) for k in kept)
    product = re.sub(r"-(SHARED|MIG-.*)$", "", re.sub(r"-SHARED$", "", product))
    gpu = HostGpu(
        product.replace("-", " ") or None,
        _capability(labels, name),
        _number(labels.get("nvidia.com/gpu.memory"))
        if "-MIG-" not in _text(labels.get("nvidia.com/gpu.product"))
        else None,
        mig=mig,
    )
    count = _number(labels.get("nvidia.com/gpu.count"))
    return Host(
        name,
        _label_driver(labels, name),
        _gpus(gpu, 1 if count is None else max(count, 1), name),
        cuda_max=_text(labels.get("nvidia.com/cuda.runtime-version.full")) or None,
        arch=arch,
        os=_text(info.get("osImage")) or None,
        labels={str(k): str(v) for k, v in kept.items()},
        source="kubernetes",
    )


def _capability(labels: Mapping[str, Any], name: str) -> str | None:
    major, minor = (labels.get(f"nvidia.com/gpu.compute.{part}") for part in ("major", "minor"))
    if major is None:
        return None
    sm = parse_sm(f"{major}.{minor if minor is not None else 0}")
    if sm is None:
        raise UsageError(f"node {name}: compute capability {str(major)[:20]!r}.{str(minor)[:20]!r} is none")
    return sm


def _label_driver(labels: Mapping[str, Any], name: str) -> str | None:
    text = _text(labels.get("nvidia.com/cuda.driver-version.full"))
    if not text:
        for base, last in (("nvidia.com/cuda.driver-version", "revision"), ("nvidia.com/cuda.driver", "rev")):
            parts = [str(labels.get(f"{base}.{part}") or "").strip() for part in ("major", "minor", last)]
            if parts[0]:
                text = ".".join(part for part in parts if part)
                break
    if not text:
        return None
    try:
        return parse_driver(text)
    except UsageError as error:
        raise UsageError(f"node {name}: {error.cause}") from error


# --- Slurm -----------------------------------------------------------------------------------------------------------


def _slurm_json(data: Any) -> Iterator[Mapping[str, Any]] | None:
    """`scontrol show node --json` and `sinfo --json`."""
    if not isinstance(data, dict):
        return None
    nodes, rows = data.get("nodes"), data.get("sinfo")
    if isinstance(nodes, list) and ("meta" in data or any("gres" in _mapping(n) for n in nodes[:50])):
        return (
            {
                "name": _mapping(n).get("name"),
                "arch": _mapping(n).get("architecture"),
                "gres": _mapping(n).get("gres"),
                "features": _mapping(n).get("features"),
                "os": _mapping(n).get("operating_system"),
            }
            for n in nodes
        )
    if isinstance(rows, list):
        return _sinfo_json(rows)
    return None


def _sinfo_json(rows: list[Any]) -> Iterator[Mapping[str, Any]]:
    for row in rows:
        names = _mapping(_mapping(row).get("nodes")).get("nodes")
        gres = _mapping(row).get("gres")
        features = _mapping(row).get("features")
        for packed in names if isinstance(names, list) else []:
            for name in expand(_text(packed)):
                yield {
                    "name": name,
                    "gres": _mapping(gres).get("total") if isinstance(gres, dict) else gres,
                    "features": _mapping(features).get("total") if isinstance(features, dict) else features,
                }


def _scontrol(text: str) -> Iterator[Mapping[str, Any]]:
    """Blocks of KEY=VALUE that start with NodeName=, in lines or on one line each."""
    for block in re.split(r"(?:^|\n)(?=NodeName=)", text):
        if not block.strip():
            continue
        pairs = dict(
            re.findall(r"(?:^|\s)([A-Za-z][A-Za-z_:]{0,40})=(.*?)(?=\s+[A-Za-z][A-Za-z_:]{0,40}=|\s*$)", block, re.S)
        )
        yield {
            "name": pairs.get("NodeName"),
            "arch": pairs.get("Arch"),
            "gres": pairs.get("Gres"),
            "features": pairs.get("AvailableFeatures"),
            "os": pairs.get("OS"),
        }


def _sinfo_header(line: str) -> bool:
    words = set(_cells(line))
    return bool(words & {"NODELIST", "HOSTNAMES", "HOSTNAME"}) and "GRES" in words


def _cells(line: str) -> list[str]:
    return [cell for cell in re.split(r"[\s|]+", line) if cell]


def _sinfo(text: str) -> Iterator[Mapping[str, Any]]:
    lines = text.splitlines()
    head = _cells(lines[0])
    at = {name: head.index(name) for name in head}
    named = next(name for name in ("NODELIST", "HOSTNAMES", "HOSTNAME") if name in at)
    for number, line in enumerate(lines[1:], 2):
        cells = _cells(line)
        if not cells:
            continue
        if len(cells) < len(head):
            raise UsageError(
                f"line {number} of sinfo has {len(cells)} of {len(head)} columns", f"use: {_HINT['slurm']}"
            )
        features = cells[at["AVAIL_FEATURES"]] if "AVAIL_FEATURES" in at else None
        for name in expand(cells[at[named]]):
            yield {"name": name, "gres": cells[at["GRES"]], "features": features}


def expand(names: str) -> Iterator[str]:
    """Slurm's short form: "gpu[01-03,07],login" -> gpu01, gpu02, gpu03, gpu07, login.

    Raises:
        UsageError: brackets that do not close, or a range that is none or far too long.
    """
    if names.count("[") != names.count("]"):
        raise UsageError(f"node list {names[:60]!r} cannot be read", "list each node: sinfo -N")
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", names):
        match = re.fullmatch(r"([^\[\]]*)\[([0-9,-]+)\]([^\[\]]*)", part)
        if not match:
            if "[" in part or "]" in part:
                raise UsageError(f"node list {names[:60]!r} cannot be read", "list each node: sinfo -N")
            yield part
            continue
        for span in match[2].split(","):
            first, _, last = span.partition("-")
            if not first or (span.count("-") and not last) or span.count("-") > 1 or len(span) > 20:
                raise UsageError(f"node list {names[:60]!r} cannot be read", "list each node: sinfo -N")
            if int(last or first) - int(first) > MAX_NODES:
                raise UsageError(f"node list {names[:60]!r} names more than {MAX_NODES:,} nodes")
            for number in range(int(first), int(last or first) + 1):
                yield f"{match[1]}{number:0{len(first)}d}{match[3]}"


def _from_slurm(row: Mapping[str, Any], where: str) -> Host:
    name = _name(row.get("name"), where)
    arch = _arch(row.get("arch"), name)
    features = row.get("features")
    words = features if isinstance(features, list) else _text(features).split(",")
    gpus: list[HostGpu] = []
    entries = list(_gres(row.get("gres")))
    # A gres without type, or with that of a MIG slice alone ("1g.10gb"): the node's other GPUs name the model, or its
    # features do, as at many sites.
    plain = [w.removeprefix("gpu:").removeprefix("gpu_") for w in words if isinstance(w, str)]
    models = [*(_model(kind) for kind, _ in entries), *(w for w in plain if _looks_like_gpu(w))]
    other = next((model for model in models if model), "")
    for kind, number in entries:
        count = 1 if number is None else number
        mig = bool(kind and re.search(r"(^|[_.-])[1-7]g\.", kind))
        model = _model(kind) or other
        if not model and count:
            raise UsageError(
                f"node {name}: its gres says gpu:{kind or count} without a type, and no feature names one; "
                "a record folder or host file named like the node (--host) tells"
            )
        gpus += _gpus(HostGpu(model.replace("_", " ") or None, parse_sm(model), mig=mig), count, name)
    os_text = _text(row.get("os"))
    kept = ",".join(word for word in words if isinstance(word, str) and word and word != "(null)")
    labels = {FEATURES: kept} if kept else {}
    return Host(name, None, tuple(gpus), arch=arch, os=os_text[:80] or None, labels=labels, source="slurm")


def _model(kind: str | None) -> str:
    """The type of a gres without the MIG slice: "a100_1g.5gb" -> "a100"."""
    return re.sub(r"[_-]?(mig[_-]?)?[1-7]g\.[0-9]+gb.*$", "", kind or "", flags=re.IGNORECASE)


_MODEL = re.compile(
    r"(nvidia[_-]?)?(tesla[_-]?)?([abhlptv]\d{1,4}|g?[bh]\d{3}|rtx|gtx|titan|quadro)[\w.-]*", re.IGNORECASE
)


def _looks_like_gpu(word: str) -> bool:
    return bool(_MODEL.fullmatch(word)) and len(word) < 60


def _gres(value: Any) -> Iterator[tuple[str | None, int | None]]:
    """The GPUs in a gres text: "gpu:a100:8(S:0-1),nvme:1" -> ("a100", 8)."""
    text = re.sub(r"\([^()]*\)", "", _text(value))
    for part in text.split(","):
        fields = part.strip().split(":")
        if fields[0] != "gpu":
            continue
        numbers = [f for f in fields[1:] if re.fullmatch(r"[0-9]{1,9}", f)]
        kinds = [f for f in fields[1:] if f and not re.fullmatch(r"[0-9]{1,9}", f)]
        yield (kinds[0] if kinds else None), (int(numbers[-1]) if numbers else None)


def with_drivers(
    inventory: Inventory, measured: Mapping[str, Host], driver: str | None, where: str
) -> tuple[Host, ...]:
    """The hosts of an inventory that knows no driver, joined with measured hosts of the same names.

    measured: hosts by name, from record folders or host files; they stand instead of the node. driver: the user's word
    for all others.

    Raises:
        UsageError: some node still has no driver (named).
    """
    joined = []
    for host in inventory.hosts:
        if host.name in measured:
            joined.append(replace(measured[host.name], count=host.count))
        else:
            joined.append(replace(host, driver=host.driver or driver))
    missing = [host.name for host in joined if host.driver is None]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        what = "Slurm knows no driver" if inventory.kind == "slurm" else "there is no driver label"
        raise UsageError(
            f"{where}: {what}, and none is given for {shown}",
            "say --driver V for all of them, or give a record folder or host file named like each node: --host DIR "
            "(envforge detect --script makes the probe that writes it)",
        )
    return tuple(joined)
