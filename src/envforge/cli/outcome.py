"""What a build leaves: the project's frozen files, and the answer on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envforge.cli.planned import Found
    from envforge.image.values import BuildResult


def write_project(found: Found, result: BuildResult | None) -> None:
    """build.json, plan and lock beside image.yaml: what `job` needs, frozen. Paths are relative to the project.

    Without a result (nothing was built) only plan and lock.
    """
    from envforge.files import write_atomic

    assert found.project is not None
    write_atomic(found.project / "plan.json", found.plan.dumps())
    write_atomic(found.project / "pylock.toml", found.lock.pylock)
    if result is not None:
        write_build(found.project, result, found.plan.hash(), found.lock.hash)


def write_build(project: Path, result: BuildResult, plan_hash: str, lock_hash: str | None) -> None:
    """build.json, and the receipt that belongs to it, in a project folder."""
    import json

    from envforge.files import write_atomic
    from envforge.image.state import note_user, state_root

    data = result.to_json() | {
        "log": None,
        "receipt": None,
        "sbom": None,
        "plan_hash": plan_hash,
        "lock_hash": lock_hash,
    }
    if result.engine == "venv":
        data["reference"] = "."
    if result.proof is not None:
        receipts = project / "receipts"
        receipts.mkdir(exist_ok=True)
        name = f"{result.address[:12]}-{result.grade}.json"
        write_atomic(receipts / name, json.dumps(result.proof, indent=1, ensure_ascii=False) + "\n")
        data["receipt"] = f"receipts/{name}"
    if result.sbom is not None and result.sbom.is_file():
        write_atomic(project / result.sbom.name, result.sbom.read_bytes())
        data["sbom"] = result.sbom.name
    write_atomic(project / "build.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    if result.engine != "venv" and result.address:
        note_user(state_root(name=result.address[:16]), project)


def run_line(result: BuildResult, gpu: bool) -> str:
    """How to run something in it. Workers and NCCL need more of /dev/shm than the 64 MiB that docker gives."""
    if result.engine == "venv":
        return f"{result.reference}/bin/envforge-entrypoint python ..."
    gpus = ("--device nvidia.com/gpu=all " if result.engine == "podman" else "--gpus all ") if gpu else ""
    return f"{result.engine} run --rm {gpus}--shm-size 1g {result.reference} python ..."


def report(result: BuildResult, gpu: bool) -> str:
    """The answer in a few lines."""
    lines = [
        f"{result.reference}",
        f"  {_how(result)} in {result.seconds:.0f} s, {result.size / 1e6:,.0f} MB, {result.digest}",
    ]
    proof: dict[str, Any] = result.proof or {}
    if result.grade is not None:
        lines.append(f"  proof: passed ({result.grade}), receipt {result.receipt}")
    if result.registry is not None and result.here:
        lines.append(f"  {'pushed as' if result.registry['pushed'] else 'also there as'} {result.registry['image']}")
        lines += ["  with its receipt beside it"] if result.registry.get("proof") else []
    answer = (proof.get("chat") or {}).get("base")
    if answer:
        lines.append(f"  chat: {proof['chat'].get('prompt')!r} -> {answer!r}")
    losses = proof.get("losses") or []
    if losses:
        lines.append("  loss: " + " ".join(f"{loss:.3f}" for loss in losses))
    lines.append(f"  run: {run_line(result, gpu)}")
    if result.pending:
        lines.append(f"  {result.pending}; get it with: envforge job slurm --verify")
    return "\n".join(lines)


def _how(result: BuildResult) -> str:
    if not result.here:
        return "found in the registry, nothing to build"
    return "found, nothing to build" if result.reused else "built"
