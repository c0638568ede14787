"""Frozen values that the YAML files of matrix/data become once they are validated.

Nothing here reads a file; `load` does. Versions are kept as the strings that the source prints; comparing them is the
resolver's work. Compute capabilities are strings such as "8.6". A GPU is "covered" by rules that live in
`envforge.resolver.hosts`, not here.

Rows are named tuples: a dataclass costs every start of the program about a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Confidence = Literal[
    "verified-from-metadata", "verified-by-execution", "from-official-doc", "from-issue-report", "inferred"
]
Role = Literal["trainer", "framework", "engine", "torch", "companion", "library"]
Level = Literal["hard", "warn"]
Arch = Literal["x86_64", "aarch64"]


class Source(NamedTuple):
    """Where a row comes from: `text` names the document, file or run; `confidence` says how it was established."""

    text: str
    confidence: Confidence


class Toolkit(NamedTuple):
    """One CUDA toolkit release and the Linux driver it shipped with (`driver` is None where none is published)."""

    cuda: str  # "12.4"
    release: str  # "GA", "Update 1"
    driver: str | None  # "550.54.14"
    branch: int  # 550
    source: Source


class Family(NamedTuple):
    """The driver floor of a CUDA major: minor-version compatibility starts here."""

    major: int
    min_driver: str
    source: Source


class Branch(NamedTuple):
    """A driver branch: the CUDA version that nvidia-smi reports for it, its type and end of life where known."""

    branch: int
    cuda: str
    type: str | None  # LTSB, PB, NFB
    eol: str | None  # "2028-06"
    source: Source


class ForwardCompat(NamedTuple):
    """Driver branches on which the cuda-compat package of one CUDA version is supported."""

    cuda: str
    package: str
    branches: tuple[int, ...]
    source: Source


class Architecture(NamedTuple):
    """A GPU generation: its compute capabilities and the toolkits and driver branches that know it."""

    name: str
    sm: tuple[str, ...]
    first_cuda: str
    last_cuda: str | None  # "12.x" means every 12
    last_branch: int | None
    source: Source


class Gpu(NamedTuple):
    """A GPU model. `memory_gib` lists the sizes it was sold with; `forward` is forward-compatibility eligibility."""

    name: str
    sm: str
    memory_gib: tuple[int, ...]
    architecture: str
    bf16: bool
    fp8: bool
    data_center: bool
    forward: bool
    first_cuda: str | None
    last_cuda_major: int | None
    first_branch: int | None
    last_branch: int | None
    arch: Arch | None  # host architecture when the part exists for one only
    aliases: tuple[str, ...]
    source: Source


class TorchBuild(NamedTuple):
    """One build of a torch minor: variant, toolkit, and the GPU code in the wheel for one host architecture.

    `sm` lists cubins, `ptx` the virtual architectures that are embedded as PTX. The `cpu` variant has neither.
    """

    torch: str  # minor, "2.6"
    variant: str  # "cu126", "cpu"
    cuda: str | None  # "12.6"
    arch: Arch
    sm: tuple[str, ...]
    ptx: tuple[str, ...]
    default: bool  # what a plain install from the default index gives
    source: Source


class NativeLib(NamedTuple):
    """What native code a range of releases of a package carries.

    cuda: CUDA versions that have a library ("12.6"); `match` says how they fit torch's: `exact`, `major` (any library
    of the same major), or `any` (no CUDA library of its own). `sm`/`ptx` as in TorchBuild, empty where unknown.
    `torch`: minors with a ready-made wheel ("" = no limit of its own). `source_only`: no wheel, compiled on install.
    """

    package: str
    versions: str  # PEP 440 specifier
    cuda: tuple[str, ...]
    match: Literal["exact", "major", "any"]
    sm: tuple[str, ...]
    ptx: tuple[str, ...]
    source_only: bool
    source: Source


class Rule(NamedTuple):
    """Known bad or a run-time floor: wherever every `when` holds, every `needs` must hold too, if it is there at all.

    Keys of `when` and `needs` are package names, or one of the virtual names `python`, `variant`, `cuda`, `driver`,
    `glibc`, `sm`. Values are PEP 440 specifiers; for `variant` a comma-separated list of names; for `cuda` a specifier
    on torch's CUDA version (no `cpu`); for `sm` a specifier on every GPU's compute capability. A `needs` on a package
    that is not in the answer is met: a rule never pulls a package in. `requires` does: packages that must be there
    though no metadata says so.
    `level` hard = seen to fail at import or in a step; warn = only a table says so, or only some uses fail.
    """

    id: str
    level: Level
    when: Mapping[str, str]
    needs: Mapping[str, str]
    requires: Mapping[str, str]
    text: str  # one sentence: what breaks and how
    warning: str | None  # warning id in a resolve answer when level is warn
    source: Source


class PackageRow(NamedTuple):
    """A requestable package: its role and place in the total order of decisions (smaller rank decides first)."""

    name: str  # normalised (PEP 503)
    role: Role
    rank: int
    summary: str
    import_name: str | None
    source: Source
    sources_ok: bool = False  # a source archive may be built (flash-attn, deepspeed)


class Base(NamedTuple):
    """A base image: reference, digest where known, glibc, the pythons it brings, OS release name."""

    ref: str
    digest: str | None
    os: str  # "debian12", "ubuntu22.04"
    glibc: str
    pythons: tuple[str, ...]
    arch: tuple[str, ...]
    kind: Literal["slim", "distribution", "cuda-base", "cuda-runtime", "cuda-devel"]
    cuda: str | None
    source: Source


class Note(NamedTuple):
    """A sourced statement that no code reads but people ask for (kept so that no fact is lost)."""

    id: str
    about: str
    text: str
    source: Source


class RemoteModel(NamedTuple):
    """A model family whose own Python files (`trust_remote_code`) do not fit every release.

    `match` is compared with the lower-cased model id or `model_type` (substring); `needs` as in Rule.
    """

    family: str
    match: tuple[str, ...]
    needs: Mapping[str, str]
    text: str
    source: Source


class Policy(NamedTuple):
    """Choices that are ours, not facts: the order of pythons, the date up to which the matrix is complete."""

    as_of: str  # ISO date: the matrix's own "today"
    pythons: tuple[str, ...]  # preference order
    coherence_days: int  # releases up to this many days after the anchor count as current together
    stale_days: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """Everything hand-written, plus the hash of the files it came from. Releases load per package, see `releases`."""

    toolkits: tuple[Toolkit, ...]
    families: tuple[Family, ...]
    branches: tuple[Branch, ...]
    forward: tuple[ForwardCompat, ...]
    architectures: tuple[Architecture, ...]
    gpus: tuple[Gpu, ...]
    torch_builds: tuple[TorchBuild, ...]
    packages: Mapping[str, PackageRow]
    native: tuple[NativeLib, ...]
    rules: tuple[Rule, ...]
    bases: tuple[Base, ...]
    policy: Policy
    notes: tuple[Note, ...] = ()
    hash: str = ""
    layers: tuple[str, ...] = ("shipped",)
    remote_models: tuple[RemoteModel, ...] = ()
