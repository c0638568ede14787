"""The receipt: what was checked, the figures, and whether it passed; written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envforge.verify.record import FAIL
from envforge.verify.settings import Settings
from envforge.verify.supervise import Layer

SCHEMA = 1


@dataclass(frozen=True)
class Verdict:
    """Whether the proof passed, and the first check that failed."""

    passed: bool
    layer: str | None = None
    check: str | None = None
    text: str | None = None


def verdict(layers: list[Layer]) -> Verdict:
    """The first failed check in the order of the layers decides."""
    for layer in layers:
        for check in layer.checks:
            if check.status == FAIL:
                return Verdict(False, layer.name, check.id, check.text)
    return Verdict(True)


def make_receipt(settings: Settings, layers: list[Layer], started: float, seconds: float) -> dict[str, Any]:
    """Plain data as it is here; `public` makes of it what may leave the machine."""
    notes: dict[str, Any] = {}
    for layer in layers:
        notes.update(layer.notes)
    found = verdict(layers)
    plan = settings.plan or {}
    host = notes.pop("host", {})
    versions = notes.pop("versions", {})
    chat = {
        "prompt": settings.prompt,
        "base": notes.pop("chat", {}).get("answer"),
        "four_bit": notes.pop("chat_four_bit", {}).get("answer"),
        "merged": notes.pop("chat_merged", {}).get("answer"),
    }
    return {
        "schema": SCHEMA,
        "kind": "receipt",
        "grade": settings.grade,
        "passed": found.passed,
        "pending": pending(settings) if found.passed else None,
        "first_failure": None if found.passed else {"layer": found.layer, "check": found.check, "text": found.text},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(seconds, 2),
        "device": settings.device,
        "stack": settings.stack,
        "model": {"id": settings.model_id, "revision": settings.revision, "expect": settings.expect},
        "plan_hash": settings.plan_hash,
        "lock_hash": settings.lock_hash,
        "image_digest": os.environ.get("ENVFORGE_IMAGE_DIGEST") or None,
        "plan": {key: plan.get(key) for key in ("variant", "tier", "python", "cuda", "as_of")} if plan else None,
        "versions": versions,
        "host": host,
        "settings": {
            "steps": settings.steps,
            "max_length": settings.max_length,
            "batch_size": settings.batch_size,
            "accumulation": settings.micro_batches,
            "learning_rate": settings.learning_rate,
            "max_grad_norm": settings.max_grad_norm,
            "precision": settings.precision,
            "seed": settings.seed,
            "trust_remote_code": settings.trust_remote_code,
            "limits": settings.limits,
        },
        "chat": chat,
        "losses": notes.pop("losses", []),
        "gradient_norms": notes.pop("gradient_norms", []),
        "notes": notes,
        "layers": [layer.to_json() for layer in layers],
        "findings": [] if found.passed else None,  # None: not asked yet
        "places": places(settings),
    }


def public(receipt: dict[str, Any]) -> dict[str, Any]:
    """What is written down, fit to be shown to others: folders of this machine and its name are words in brackets."""
    rest = {key: value for key, value in receipt.items() if key != "places"}
    hidden: dict[str, Any] = neutral(rest, [(path, word) for path, word in receipt.get("places", ())])
    return hidden


def places(settings: Settings) -> list[tuple[str, str]]:
    """Folders of this machine and what stands for them, the longest first."""
    named = [
        (settings.workdir, "<scratch>"),
        (settings.model, "<model>"),
        (settings.data, "<data>"),
        (settings.lock, "<lock>"),
        (sys.prefix, "<prefix>"),
        (sys.base_prefix, "<python>"),
        (str(Path(__file__).resolve().parents[2]), "<envforge>"),
        (os.getcwd(), "<here>"),  # noqa: PTH109
        (os.path.expanduser("~"), "~"),  # noqa: PTH111
    ]
    found: dict[str, str] = {}
    for path, word in named:
        for form in (path, os.path.realpath(path)) if path else ():
            if len(form) > 3 and (word == "~" or form.count("/") > 1):  # "/usr" says nothing, and stands everywhere
                found.setdefault(form, word)
    return sorted(found.items(), key=lambda item: -len(item[0]))


# As NCCL prints them: the address that it listens on, and the machine's name before the numbers of process and thread.
_ADDRESS = re.compile(r"(?<=:)\d{1,3}(?:\.\d{1,3}){3}(?=[<:])")
_NODE = re.compile(re.escape(platform.node() or "\0") + r"(?=:\d+:\d+ )")


def neutral(value: Any, known: list[tuple[str, str]]) -> Any:
    """The same data with these words in every string."""
    if isinstance(value, str):
        for path, word in known:
            value = value.replace(path, word)
        return _NODE.sub("<node>", _ADDRESS.sub("<address>", value))
    if isinstance(value, dict):
        return {key: neutral(inner, known) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [neutral(inner, known) for inner in value]
    return value


def pending(settings: Settings) -> str | None:
    """What a static proof leaves open."""
    if settings.grade != "static":
        return None
    return (
        "the proof on the GPU is pending: run it where the plan's GPU is (envforge job slurm --verify, or verify there)"
    )


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become the strings "nan", "inf", "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def dumps(receipt: dict[str, Any]) -> str:
    """The receipt as text: sorted keys, one space of indent."""
    return json.dumps(plain(receipt), indent=1, sort_keys=True, ensure_ascii=False, default=str)


def place_fault(path: Path) -> str | None:
    """Why no file can be written there, asked before the work is done; None where it can. Its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    if path.is_dir():
        return f"{path} is a folder, and a file is to be written there"
    place = path if path.exists() and not path.is_file() else path.parent
    return None if os.access(place, os.W_OK) else f"{path} cannot be written: no permission in {path.parent}"


def write_atomic(path: Path, receipt: dict[str, Any]) -> None:
    """Write JSON next to its place, then move it there. A device or a pipe is written into: a move would replace it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(dumps(receipt) + "\n", encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=str(path.parent), prefix=f".{path.name}.")
    scratch = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(receipt) + "\n")
        umask = os.umask(0)
        os.umask(umask)
        scratch.chmod(0o666 & ~umask)
        scratch.replace(path)
    except BaseException:
        scratch.unlink()
        raise
