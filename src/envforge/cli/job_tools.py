"""Which way to run containers a Slurm cluster has, as far as it can be seen from the machine that submits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envforge.jobs.model import JobSpec


def choose_tool(word: str, spec: JobSpec) -> str:
    """The tool that was asked for, or for `auto` what the image's file is for, else what is there.

    Raises:
        UsageError: unknown, or nothing is to be seen.
    """
    import shutil

    from envforge.errors import UsageError
    from envforge.jobs.slurm import TOOLS

    if word != "auto":
        if word not in TOOLS:
            raise UsageError(f"no container tool is named {word[:40]!r}", f"known: auto, {', '.join(TOOLS)}")
        return word
    if spec.image_file:
        path = Path(spec.image_file)
        if path.suffix in (".sqsh", ".squashfs", ".sif"):
            return "apptainer" if path.suffix == ".sif" else "pyxis"
        if (path / "bin" / "envforge-entrypoint").is_file():
            return "none"
        if (path / "config.json").is_file():
            return "oci"
        raise UsageError(
            f"{path} is no .sqsh, .sif, OCI bundle or environment folder", "name the tool: --container-tool"
        )
    if _has_pyxis():
        return "pyxis"
    for name in ("apptainer", "podman", "docker"):
        if shutil.which(name):
            return name
    raise UsageError("no container tool is to be seen from here", "say what the nodes have: --container-tool pyxis|...")


def _has_pyxis() -> bool:
    """pyxis adds its options to srun's own help."""
    import subprocess

    try:
        done = subprocess.run(["srun", "--help"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "--container-image" in done.stdout
