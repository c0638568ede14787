"""envforge job: a plan's image and a command as a job of a scheduler; what became of it; its logs."""

from __future__ import annotations

import importlib

import typer

# Each module has `register(job)`, as the commands of the application have.
PARTS = ("job_slurm", "job_kubernetes", "job_follow", "job_collect")

job = typer.Typer(help="Run an image as a cluster job: Slurm, Kubernetes.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command and its parts."""
    for name in PARTS:
        importlib.import_module(f"envforge.cli.{name}").register(job)
    app.add_typer(job, name="job")
