"""What the log itself, the host file and the options say of versions and devices, and what the matrix makes of it.

The log is full of versions that are not installed ones (requirements, advice, other packages' notices), so each source
has a weight and the strongest wins; the options win over everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from envforge.errors import EnvforgeError

if TYPE_CHECKING:
    from envforge.matrix.model import Gpu, Matrix, TorchBuild
    from envforge.resolver.hosts import Host

Version = tuple[int, ...]
MAX_HITS = 400  # matches of one fact pattern that are looked at

PACKAGES = (
    "transformers", "peft", "trl", "accelerate", "unsloth", "unsloth_zoo", "bitsandbytes", "xformers", "flash_attn",
    "deepspeed", "tokenizers", "numpy", "triton", "torchao", "vllm", "datasets", "huggingface_hub", "torchvision",
    "xtuner", "mmengine", "safetensors", "pyarrow", "setuptools",
)  # fmt: skip

_DRIVER = r"(?P<driver>\d{3}\.\d{2,3}(?:\.\d{2,3})?)\b"
_MAKES = "NVIDIA|Tesla|GeForce|Quadro|GRID"
_TORCH = r"v?(?P<torch>[12]\.\d{1,2}(?:\.\d+)?(?:a0|rc\d+|\.dev\d+)?)(?:\+(?P<local>cu\d{3}|cpu|rocm[\d.]+))?"


@dataclass(frozen=True, slots=True)
class Reading:
    """A pattern that reads facts, and how much its word counts."""

    re: str
    literal: str
    weight: int = 1


@lru_cache(maxsize=1)
def readings() -> tuple[Reading, ...]:
    """Every fact pattern with its literal."""
    rows = [
        Reading(r"driver version\s*[:=]?\s*" + _DRIVER, "driver version", 3),
        Reading(r"NVIDIA-SMI " + _DRIVER, "nvidia-smi ", 3),
        Reading(r"Kernel Module(?: for \w+)?\s+" + _DRIVER, "kernel module", 3),
        Reading(r"\bdriver[ :=]+(?:version )?" + _DRIVER, "driver", 1),
        Reading(r"CUDA (?:UMD )?Version\s*:\s*(?P<driver_cuda>\d\d\.\d)", "version", 2),
        Reading(r"cudaDriverVersion (?P<cuda_code>\d{5})", "cudadriverversion", 2),
        Reading(r"found version (?P<cuda_code>\d{5})", "found version", 3),
        Reading(r"release (?P<nvcc>\d\d\.\d), V\d", "release ", 2),
        Reading(r"CUDA used to build PyTorch\s*:\s*(?P<torch_cuda>\d\d\.\d|None)", "cuda used to build", 3),
        Reading(r"torch\.version\.cuda\W+(?P<torch_cuda>\d\d\.\d|None)", "torch.version.cuda", 3),
        Reading(r"\bpytorch\s+" + _TORCH + r"\s+py\d\.\d+_(?P<local2>cpu)", "pytorch", 3),
        Reading(r"torch was compiled with (?P<torch_cuda>\d\d\.\d)", "torch was compiled", 2),
        Reading(r"\(you have " + _TORCH + r"\)", "you have", 4),
        Reading(r"but you have torch " + _TORCH, "but you have torch", 4),
        Reading(r"\(found " + _TORCH + r"\)", "(found ", 4),
        Reading(r"PyTorch version\s*(?:\(GPU\?\))?\s*:\s*" + _TORCH, "pytorch version", 3),
        Reading(r"^\s*" + _TORCH + r"\s+(?:\d\d\.\d|None)\s*$", "+cpu", 3),
        Reading(r"^\s*" + _TORCH + r"\s+(?:\d\d\.\d|None)\s*$", "+cu1", 3),
        Reading(r"\bTorch: " + _TORCH, "torch: ", 3),
        Reading(r"torch build is (?P<local>cpu|cu\d{3})\b", "torch build is", 3),
        Reading(r"\btorch(?:==|\s+|-)" + _TORCH + r"(?![\w.]*[<>])", "torch", 2),
        Reading(r"\b(?P<torch>[12]\.\d{1,2}\.\d+)\+(?P<local>cu\d{3})\b", "+cu1", 1),
        Reading(r"\b(?P<torch>[12]\.\d{1,2}\.\d+)\+(?P<local>cpu)\b", "+cpu", 1),
        Reading(r"python(?: |/|-)?v?(?P<python>3\.\d{1,2})\b", "python", 1),
        Reading(r"--torch-backend[= ](?P<wanted>cu\d{3}|cpu)", "--torch-backend", 3),
        Reading(r"/whl/(?P<wanted>cu\d{3})\b", "/whl/cu", 2),
        Reading(r"(?:wants?|want(?:ed)?|needs?|expected?) (?P<wanted>cu\d{3})\b", " cu1", 1),
        Reading(r"(?:cuda|compute) capability(?: \(CC\))?[ :=]*(?:of )?\(?(?P<sm>\d{1,2}[.,] ?\d)\b", "capability", 2),
        Reading(r"\bsm_(?P<sm_code>\d{2,3})[af]?\b", "sm_", 0),
        Reading(r"(?:Found GPU\d+|GPU \d+:|GPU\s*[:=]|on) (?P<gpu>(?:" + _MAKES + r")[\w .()/-]{2,40})", "gpu", 2),
        *(
            Reading(rf"(?P<gpu>(?:(?:{_MAKES}) )*{word}[\w -]{{0,24}})", word.lower(), 1)
            for word in (
                "Tesla ", "GeForce ", "Quadro ", "GRID ", "NVIDIA A", "NVIDIA H", "NVIDIA B", "NVIDIA GB", "NVIDIA L",
                "NVIDIA RTX", "NVIDIA T", "RTX ", "GTX ", "V100", "A100", "H100", "H200", "B200",
            )
        ),
    ]  # fmt: skip
    for package in PACKAGES:
        name = package.replace("_", "[_-]")
        for spelled in {package, package.replace("_", "-")}:
            for glue in ("==", " ", ": ", " version"):
                rows.append(
                    Reading(
                        rf"\b{name}(?:==|\s+version:?\s*|:\s+|\s+)v?(?P<{package}>\d+\.\d[\w.]*(?:\+\w+)?)(?!\s*requires)",
                        spelled + glue,
                    )
                )
    return tuple(rows)


@dataclass(slots=True)
class Facts:
    """Facts while they are gathered, and the answers to the conditions that rules ask.

    driver: None = unknown; "none" = the host has no driver.
    """

    driver: str | None = None
    driver_given: bool = False
    host: Host | None = None
    seen: dict[str, tuple[int, str]] = field(default_factory=dict)  # name -> (weight, value)
    every: dict[str, list[str]] = field(default_factory=dict)  # name -> distinct values in order, at most 16
    cpu_weight: int = -1  # of the strongest word for a CPU build of torch: a log may speak of two environments
    note: str | None = None
    _matrix: Matrix | None = None
    _loaded: bool = False

    def take(self, groups: Mapping[str, str | None], weight: int, line: str) -> None:
        """Facts of one match. A command line tells what is wanted, not what is there."""
        command = bool(re.search(r"(?:^\s*[$#>]\s|\bRUN\b|\bpip3? install\b|\buv pip\b|\buv add\b)", line))
        for name, value in groups.items():
            if not value:
                continue
            if command and name in ("torch", "local"):
                name = {"torch": "wanted_torch", "local": "wanted"}[name]
            elif command and name in PACKAGES:
                continue
            name = "local" if name == "local2" else name
            value = value.split("  ")[0].strip() or value
            known = self.every.setdefault(name, [])
            if value not in known and len(known) < 16:
                known.append(value.strip())
            if (name, value) in (("local", "cpu"), ("torch_cuda", "None")):
                self.cpu_weight = max(self.cpu_weight, weight)
            best = self.seen.get(name)
            if best is None or weight >= best[0]:  # of equals the later one: environments change
                self.seen[name] = (weight, value.strip())

    def get(self, name: str) -> str | None:
        """The strongest value of a fact."""
        found = self.seen.get(name)
        return found[1] if found else None

    # --- what is derived -------------------------------------------------------------------------------------------

    @property
    def matrix(self) -> Matrix | None:
        """The matrix, loaded when first asked for; None (with a note) when it cannot be read."""
        if not self._loaded:
            self._loaded = True
            try:
                from envforge.settings import layered_matrix

                self._matrix = layered_matrix()
            except EnvforgeError as error:
                self.note = f"judged without the matrix: {error.cause.splitlines()[0]}"
        return self._matrix

    @property
    def has_driver(self) -> bool:
        """A driver version is known."""
        return self.driver_version is not None

    @property
    def driver_version(self) -> str | None:
        """The driver's version from the options, the host or the log."""
        if self.driver_given:
            return None if self.driver in (None, "none") else self.driver
        return self.get("driver")

    @property
    def driver_none(self) -> bool:
        """It is known that there is no driver."""
        return self.driver_given and self.driver in (None, "none")

    @property
    def driver_cuda(self) -> str | None:
        """The CUDA version that the driver reports."""
        code = self.get("cuda_code")
        if code:
            return f"{int(code) // 1000}.{int(code) % 1000 // 10}"
        if self.host and self.host.cuda_max:
            return self.host.cuda_max
        shown = self.get("driver_cuda")
        if shown:
            return shown
        version = self.driver_version
        if version and self.matrix:
            branch = int(version.split(".")[0])
            known = [row for row in self.matrix.branches if row.branch <= branch]
            return max(known, key=lambda row: row.branch).cuda if known else None
        return None

    @property
    def torch_cuda(self) -> str | None:
        """The CUDA version of torch's build ("12.6"); "cpu" for a CPU build."""
        local = self.get("local")
        if local and local.startswith("cu"):
            return f"{local[2:4]}.{local[4:]}"
        if local == "cpu":
            return "cpu"
        stated = self.get("torch_cuda")
        if stated:
            return "cpu" if stated.lower() == "none" else stated
        return None

    @property
    def gpus(self) -> list[Gpu]:
        """GPU models that the host file or the log names and the matrix knows."""
        names = [gpu.name for gpu in self.host.gpus if gpu.name] if self.host else []
        names += self.every.get("gpu", [])
        if not names or not self.matrix:
            return []
        from envforge.matrix.gpus import find_gpu

        found: dict[str, Gpu] = {}
        for name in names:
            words = name.split()
            for cut in range(len(words), 0, -1):  # a name in running text: "Tesla T4 with fp16" is "Tesla T4"
                row = find_gpu(self.matrix, " ".join(words[:cut]).rstrip(".,;:)"))
                if row:
                    found.setdefault(row.name, row)
                    break
        return list(found.values())

    @property
    def capabilities(self) -> list[Version]:
        """Compute capabilities of the GPUs in question."""
        texts = [gpu.sm for gpu in self.host.gpus if gpu.sm] if self.host else []
        texts += [value.replace(",", ".").replace(" ", "") for value in self.every.get("sm", [])]
        texts += [gpu.sm for gpu in self.gpus]
        return sorted({version(text) for text in texts})

    @property
    def floor(self) -> str | None:
        """The lowest driver for torch's CUDA family."""
        return self.family_floor(self.torch_cuda)

    def family_floor(self, cuda: str | None) -> str | None:
        """The driver floor of a CUDA version's family, from the matrix."""
        if not cuda or cuda == "cpu" or not self.matrix:
            return None
        from envforge.resolver.hosts import family_floor

        return family_floor(self.matrix, int(cuda.split(".")[0]))

    def usable_variants(self) -> list[str]:
        """torch variants whose CUDA family the known driver runs (for the torch release that is there, if any)."""
        driver, cuda = self.driver_version, self.driver_cuda
        if not self.matrix or not (driver or cuda):
            return []
        torch = self.get("torch")
        minor = ".".join(torch.split(".")[:2]) if torch else None
        builds = [row for row in self.matrix.torch_builds if row.cuda and row.arch == "x86_64"]
        same = [row for row in builds if row.torch == minor]
        fitting = [row for row in same or builds if self._runs(row, driver, cuda)]
        fitting = fitting or [row for row in builds if self._runs(row, driver, cuda)]
        return sorted({row.variant for row in fitting}, key=lambda v: int(v[2:]), reverse=True)

    def _runs(self, build: TorchBuild, driver: str | None, cuda: str | None) -> bool:
        if driver:
            floor = self.family_floor(build.cuda)
            return floor is not None and version(driver) >= version(floor)
        assert build.cuda is not None and cuda is not None
        return int(build.cuda.split(".")[0]) <= int(cuda.split(".")[0])

    def last_torch(self, variant: str) -> str | None:
        """The newest torch minor that has a variant."""
        if not self.matrix:
            return None
        minors = [row.torch for row in self.matrix.torch_builds if row.variant == variant]
        return max(minors, key=version) if minors else None

    def lacks_code(self) -> bool | None:
        """Whether torch's build has no code for a GPU in question; None when that cannot be known."""
        torch, cuda, caps = self.get("torch"), self.torch_cuda, self.capabilities
        if not torch or not cuda or cuda == "cpu" or not caps or not self.matrix:
            return None
        from envforge.resolver.hosts import covers

        minor, variant = ".".join(torch.split(".")[:2]), "cu" + cuda.replace(".", "")
        builds = [row for row in self.matrix.torch_builds if row.torch == minor and row.variant == variant]
        if not builds:
            return None
        return any(not any(covers(row.sm, row.ptx, ".".join(map(str, cap)), True) for row in builds) for cap in caps)

    def values(self) -> dict[str, str]:
        """Everything that texts may name."""
        values: dict[str, str | None] = {name: best[1] for name, best in self.seen.items()}
        torch, local = self.get("torch"), self.get("local")
        variants = self.usable_variants()
        values |= {
            "driver": self.driver_version,
            "driver_cuda": self.driver_cuda,
            "torch_cuda": self.torch_cuda if self.torch_cuda != "cpu" else None,
            "torch_variant": local if local and local.startswith("cu") else None,
            "torch_build": f"{torch}+{local}" if torch and local else torch,
            "floor": self.floor,
            "family": self.torch_cuda.split(".")[0] if self.torch_cuda and self.torch_cuda != "cpu" else None,
            "variants": ", ".join(variants) or None,
            "variant": variants[0] if variants else None,
            "variant_torch": self.last_torch(variants[0]) if variants else None,
            "gpu": self.gpus[0].name if self.gpus else None,
            "sm": ".".join(map(str, self.capabilities[0])) if self.capabilities else None,
        }
        return {name: value for name, value in values.items() if value}


def version(text: str) -> Version:
    """Dotted numbers as a comparable tuple; whatever follows the numbers is left out."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:4])


def _below(facts: Facts, floor: str) -> bool:
    return facts.driver_version is not None and version(facts.driver_version) < version(floor)


def _driver_too_old(facts: Facts) -> bool:
    if facts.floor is None:
        return False
    if facts.driver_version:
        return _below(facts, facts.floor)
    cuda = facts.driver_cuda
    return cuda is not None and facts.torch_cuda is not None and version(cuda)[0] < version(facts.torch_cuda)[0]


def _driver_fits(facts: Facts) -> bool:
    return facts.floor is not None and facts.driver_version is not None and not _below(facts, facts.floor)


def _other_build(facts: Facts) -> bool:
    wanted, have = facts.get("wanted"), facts.get("local")
    return bool(wanted and have and wanted != have)


_NVSWITCH = re.compile(r"sxm|hgx|dgx|h200|b200|b300|gb200|gb300|nvl72|a800|h800|h20\b", re.IGNORECASE)

# Named questions that rules ask. Each costs something only when a rule that matched asks it.
PREDICATES: Mapping[str, Callable[[Facts], bool]] = {
    "driver-none": lambda f: f.driver_none,
    "driver-known": lambda f: f.has_driver,
    "driver-given": lambda f: f.driver_given and not f.driver_none,
    "driver-below-torch": _driver_too_old,
    "driver-fits-torch": _driver_fits,
    "driver-before-cuda12": lambda f: (
        _below(f, f.family_floor("12.0") or "525.60.13")
        or (not f.has_driver and f.driver_cuda is not None and version(f.driver_cuda)[0] < 12)
    ),
    "torch-cpu": lambda f: f.torch_cuda == "cpu" or f.cpu_weight >= f.seen.get("local", (0, ""))[0] > 0,
    "torch-other-build": _other_build,
    "torch-lacks-gpu": lambda f: f.lacks_code() is True,
    "torch-has-gpu": lambda f: f.lacks_code() is False,
    "gpu-known": lambda f: bool(f.capabilities),
    "gpu-nvswitch": lambda f: any(_NVSWITCH.search(name) for name in _names(f)),
}  # fmt: skip


def _names(facts: Facts) -> Iterable[str]:
    yield from facts.every.get("gpu", [])
    yield from (gpu.name for gpu in (facts.host.gpus if facts.host else ()) if gpu.name)
