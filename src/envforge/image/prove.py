"""The proof of what was built: `verify` runs inside it, its receipt is kept and not earned twice."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.errors import EngineError, ModelError, OutsideError, ProofFailedError
from envforge.image.engines import Engine, ImageInfo, Mount
from envforge.image.values import BuildOptions, BuildResult, Event, Grade, Progress
from envforge.resolver.plan import Plan
from envforge.verify.models import folder_fault

if TYPE_CHECKING:
    from envforge.spec import Spec

PENDING = (
    "the GPU proof is pending: this machine has no GPU that the image can use, so imports, pins and native libraries "
    "were proven and nothing was run on a GPU"
)
SMALL = "small"  # the word for the small real model that a package carries
ModelMaker = Callable[[Engine, ImageInfo, str], Path]
Explainer = Callable[[dict[str, Any]], dict[str, Any]]
_MODEL = "/opt/envforge/model"
_RECEIPT = "/workspace/receipt.json"


def stamp() -> str:
    """Now (UTC), for file names."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S")


def check_model(options: BuildOptions) -> None:
    """Refuse a model folder that is not whole before anything is built.

    Raises:
        ModelError: it is none.
    """
    model = options.model
    if not options.verify or model in (None, SMALL) or not _is_folder(model or ""):
        return
    if fault := folder_fault(Path(model or "").expanduser()):
        raise ModelError(f"{model} {fault}", "name the folder that holds the model's files")


def prove(
    plan: Plan,
    spec: Spec,
    options: BuildOptions,
    engine: Engine,
    image: ImageInfo,
    result: BuildResult,
    state: Path,
    progress: Progress,
    make_model: ModelMaker | None,
    explain: Explainer | None = None,
) -> BuildResult:
    """Run `verify` inside, keep its receipt. A receipt of the same content is not earned twice.

    explain: adds what a diagnosis finds to a receipt that did not pass; inside the image there is none to ask.
    """
    gpus = plan.variant != "cpu" and engine.gpus()
    grade: Grade = "full" if plan.variant == "cpu" or gpus else "static"
    kept = state / f"receipt-{grade}.json"
    asked = {"digest": image.id, "address": result.address, "model": options.model, "steps": options.steps}
    known = _read_receipt(kept)
    if known is not None and known.get("image") == asked and not options.rebuild:
        return replace(result, receipt=kept, grade=grade, proof=known, pending=_pending(grade))
    model = options.model if grade == "full" else None
    if model is None and grade == "full":
        model = SMALL if spec.model is None or spec.model.small else spec.model.id.removeprefix("hf:")
    if model == SMALL and make_model is not None:
        progress(Event("stage", "getting the small model"))
        model = str(make_model(engine, image, result.reference))
    progress(Event("stage", f"proving it ({grade})"))
    argv = ["verify", "--grade", grade]
    mounts: tuple[Mount, ...] = ()
    network = "none"
    fetch = _RECEIPT
    with contextlib.ExitStack() as stack:
        if engine.name == "venv":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="envforge-proof-"))
            fetch = str(Path(folder) / "receipt.json")
        argv += ["--json", fetch]
        if options.steps is not None:
            argv += ["--steps", str(options.steps)]
        env = {"ENVFORGE_IMAGE_DIGEST": image.id}
        if model is not None and _is_folder(model):
            source = Path(model).expanduser().resolve()
            mounts = (Mount(source, _MODEL),) if engine.name != "venv" else ()
            argv += ["--model", _MODEL if mounts else str(source)]
        elif model is not None:
            argv += ["--model", model]
            network = "host" if engine.name != "venv" else network
            if options.source.hub:
                env["HF_ENDPOINT"] = options.source.hub
        if network == "none" and (model is None or _is_folder(model)):
            env["HF_HUB_OFFLINE"] = "1"
        target = image.id if engine.name != "venv" else result.reference
        outcome = engine.run(
            target, argv, mounts=mounts, network=network, env=env, fetch=fetch, gpus=gpus, progress=progress
        )
    receipt = _parse_receipt(outcome.fetched)
    if receipt is not None:
        receipt = {**receipt, "image": asked}
        if outcome.code != 0 and explain is not None:
            receipt = explain(receipt)
        failed = state / f"receipt-{grade}-failed.json"
        _write_receipt(kept if outcome.code == 0 else failed, receipt)
        if outcome.code == 0 and options.output is not None and engine.name == "venv":
            receipts = options.output / "receipts"
            receipts.mkdir(exist_ok=True)
            _write_receipt(receipts / f"{stamp()}-{grade}.json", receipt)
    if outcome.code != 0:
        raise _proof_error(outcome.code, outcome.output, receipt, image, engine)
    if receipt is None:
        raise EngineError("verify passed but left no receipt", "run it again; if it stays, report it", id="no-receipt")
    return replace(result, receipt=kept, grade=_grade(receipt, grade), proof=receipt, pending=_pending(grade))


def _is_folder(model: str) -> bool:
    return model.startswith((".", "/", "~")) or Path(model).is_dir()


def _grade(receipt: dict[str, Any], asked: str) -> Any:
    return receipt.get("grade") if receipt.get("grade") in ("full", "static") else asked


def _pending(grade: str) -> str | None:
    return PENDING if grade == "static" else None


def _proof_error(
    code: int, output: str, receipt: dict[str, Any] | None, image: ImageInfo, engine: Engine
) -> ProofFailedError | OutsideError:
    words = [line for line in output.splitlines() if line.strip()]
    said = next(
        (line for line in reversed(words) if "error:" in line or "fail" in line.lower()), words[-1] if words else ""
    )
    where = f"what was built is kept without a name: {image.id}" if engine.name != "venv" else ""
    if code == 3:
        return OutsideError(f"the proof could not be run: {said.strip()[:400]}", where, id="proof-outside")
    findings = (receipt or {}).get("findings") or ()
    if findings:
        cure = " ".join(findings[0]["fixes"][:1]) or findings[0]["cause"]
        where = "\n".join(filter(None, [f"{findings[0]['title']}: {cure}", where]))
    return ProofFailedError(f"the environment was built and does not pass: {said.strip()[:400]}", where)


def _parse_receipt(data: bytes | None) -> dict[str, Any] | None:
    if data is None:
        return None
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _read_receipt(path: Path) -> dict[str, Any] | None:
    try:
        return _parse_receipt(path.read_bytes())
    except OSError:
        return None


def _write_receipt(path: Path, receipt: Mapping[str, Any]) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(receipt, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
