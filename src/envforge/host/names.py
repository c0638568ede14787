"""GPU names as old tools print them -> whole names and compute capabilities, through the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envforge.host.interpret import FindGpu
    from envforge.matrix.model import Matrix

CUT = "..."


def gpu_finder(matrix: Matrix) -> FindGpu:
    """A lookup for `interpret`. A cut name gets a capability when all models that it can mean agree on it, and is
    made whole when only one of them has the memory that was seen."""
    from envforge.matrix.gpus import find_gpu, names_of, squash

    def find(name: str, memory_mib: int | None) -> tuple[str, str | None]:
        if not name.endswith(CUT):
            row = find_gpu(matrix, name)
            return name, row.sm if row else None
        start = squash(name.removesuffix(CUT).rstrip(" -"))
        if not start:
            return name, None
        models = [gpu for gpu in matrix.gpus if any(own.startswith(start) for own in names_of(gpu))]
        capabilities = {gpu.sm for gpu in models}
        # The driver's figure is a little below the size on the box: 12227 MiB of 12 GiB.
        fitting = [
            gpu
            for gpu in models
            if memory_mib is not None and any(0.85 * gib * 1024 < memory_mib <= gib * 1024 for gib in gpu.memory_gib)
        ]
        # squash() leaves "nvidia" and the like out, so the printed start decides whether this is the same name.
        longer = [gpu for gpu in fitting if len(squash(gpu.name)) > len(start)]
        whole = longer[0].name if len(longer) == 1 and len(models) == 1 else name
        return whole, capabilities.pop() if len(capabilities) == 1 else None

    return find
