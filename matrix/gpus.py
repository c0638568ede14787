"""Finds a GPU model by the names that drivers, clouds and people use for it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from envforge.matrix.model import Gpu, Matrix

# What a driver or a shop adds to a product name without making it another chip.
_NOISE = re.compile(
    r"""nvidia|corporation|tesla|geforce|quadro|grid|graphics|gpu|generation|edition|accelerator
      |sxm[0-9]?|pcie|pci|pcie[0-9]|nvl[0-9]*|dgxs|oam|hgx|dgx|lp|ac|super\ ?pod
      |hbm[0-9]?e?|gddr[0-9]x?|[0-9]+(gb|gib|g)|[0-9]+e
      |h  # the -H of V100-SXM3-32GB-H
      """,
    re.VERBOSE,
)
_MIG = re.compile(r"\s+mig\b.*$")  # "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
_VGPU = re.compile(r"-[0-9]+[abcq]$")  # "GRID A100-10C"
_BOARD = re.compile(r"\bpg[0-9]{3}(-[0-9]{3})?\b")  # "NVIDIA A100-PG509-200"
_LAPTOP = re.compile(r"\b(with )?max-?q( design)?\b|\blaptop\b|\bmobile\b")


def squash(name: str) -> str:
    """A product name without vendor, form factor, memory size, spaces and case: "Tesla V100-SXM2-32GB" -> "v100"."""
    text = _MIG.sub("", name.strip().lower().replace("(", " ").replace(")", " "))
    text = _BOARD.sub(" ", _LAPTOP.sub(" ", _VGPU.sub("", text)))
    words = [word for word in re.split(r"[\s\-_/,]+", text) if word]
    return "".join(word for word in words if not _NOISE.fullmatch(word))


@lru_cache(maxsize=4096)
def names_of(gpu: Gpu) -> tuple[str, ...]:
    """All squashed names of a model; the cards that people play on go by their number alone too ("3090")."""
    names = [squash(name) for name in (gpu.name, *gpu.aliases)]
    if gpu.name.startswith("GeForce "):
        names.append(re.sub(r"^[rg]tx(?=[0-9])", "", names[0]))
    return tuple(dict.fromkeys(names))


def find_gpu(matrix: Matrix, name: str) -> Gpu | None:
    """The model that `name` means, or None. Whole names are compared: "RTX 4060 Ti" is never "RTX 4060"."""
    wanted = squash(name)
    return next((gpu for gpu in matrix.gpus if wanted and wanted in names_of(gpu)), None)


def nearest_gpus(matrix: Matrix, name: str, count: int = 3) -> tuple[str, ...]:
    """Names of the models most like `name`, best first, for a message about an unknown one."""
    import difflib

    known: dict[str, str] = {}
    for gpu in matrix.gpus:
        for key in names_of(gpu):
            known.setdefault(key, gpu.name)
    close = difflib.get_close_matches(squash(name), list(known), n=count * 2, cutoff=0.5)
    return tuple(dict.fromkeys(known[key] for key in close))[:count]


def collisions(gpus: Iterable[tuple[str, Iterable[str]]]) -> list[tuple[int, str, str]]:
    """(row number, name, model that already has it) for every name that two models share."""
    owner: dict[str, str] = {}
    found = []
    for number, (name, aliases) in enumerate(gpus):
        for own in (name, *aliases):
            first = owner.setdefault(squash(own), name)
            if first != name:
                found.append((number, own, first))
    return found
