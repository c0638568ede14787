"""envforge job slurm: an sbatch script, and its submission."""

from __future__ import annotations

import typer


def register(job: typer.Typer) -> None:
    """Add the commands."""
    job.command("slurm")(slurm)


def slurm() -> None:
    """Write an sbatch script, or submit it."""
    raise typer.Exit(2)
