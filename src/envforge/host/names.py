"""GPU names as old tools print them -> whole names and compute capabilities, through the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envforge.host.reading import FindGpu
    from envforge.matrix.model import Gpu, Matrix

CUT = "..."


def gpu_finder(matrix: Matrix) -> FindGpu:
    """A lookup for `interpret`.

    A name that the table cut ("Tesla V100-SXM2...") gets a capability when all models that it can mean agree on it,
    counting only those of the memory that was seen where they do not.
    """
    from envforge.matrix.gpus import find_gpu

    def find(name: str, memory_mib: int | None) -> str | None:
        if not name.endswith(CUT):
            row = find_gpu(matrix, name)
            return row.sm if row else None
        models = _models(matrix, name.removesuffix(CUT))
        for group in (models, [gpu for gpu in models if _fits(gpu, memory_mib)]):
            capabilities = {gpu.sm for gpu in group}
            if len(capabilities) == 1:
                return capabilities.pop()
        return None

    return find


def _models(matrix: Matrix, start: str) -> list[Gpu]:
    """Models with a name that begins like this one."""
    from envforge.matrix.gpus import names_of, squash

    # The last word may be cut in its middle: "GTX 108" is tried as the start of a word, then as whole words, and last
    # without it ("RTX 3060 L" of a laptop part).
    starts = [squash(f"{start}zz").removesuffix("zz") if start[-1:].isalnum() else "", squash(start)]
    starts.append(squash(start.rpartition(" ")[0]))
    for squashed in starts:
        found = [
            gpu
            for gpu in matrix.gpus
            if any(c.isdigit() for c in squashed) and any(own.startswith(squashed) for own in names_of(gpu))
        ]
        if found:
            return found
    return []


def _fits(gpu: Gpu, memory_mib: int | None) -> bool:
    """The driver's figure is a little below the size on the box: 12227 MiB of 12 GiB."""
    return memory_mib is not None and any(0.85 * gib * 1024 < memory_mib <= gib * 1024 for gib in gpu.memory_gib)
