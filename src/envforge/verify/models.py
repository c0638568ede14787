"""Turns what `--model` names (a folder, a GGUF file, a hub id) into a folder on disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# Written beside a model that envforge made: {"name", "source", "expect": {"prompt", "contains"}}.
MARKER = "envforge-model.json"


class ModelMissingError(RuntimeError):
    """The model cannot be had here; the message says why and what to do."""


def find_model(name: str, revision: str | None, workdir: Path, gguf: str | None = None) -> Path:
    """A folder with config.json.

    Raises:
        ModelMissingError: nothing there, not a model, or the hub cannot be reached.
    """
    if gguf:
        return from_gguf(Path(gguf), workdir / "from-gguf")
    path = Path(name)
    if path.is_dir():
        if fault := folder_fault(path):
            raise ModelMissingError(f"{path} {fault}")
        return path.resolve()
    looks_like_id = re.match(r"^[\w.-]+/[\w.-]+$", name) and not name.startswith((".", "/"))
    if not looks_like_id:
        raise ModelMissingError(f"{name} is no folder, and does not look like a hub id (owner/name)")
    return from_hub(name, revision)


def folder_fault(folder: Path) -> str | None:
    """What a model folder lacks, seen without loading it, so that no environment is blamed for it; None when whole."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "holds no config.json: not a model folder"
    except (OSError, ValueError) as error:
        return f"holds a config.json that cannot be read: {str(error)[:200]}"
    if not isinstance(config, dict):
        return "holds a config.json that is no mapping"
    names = {path.name for path in folder.iterdir()}
    if not any(
        name.startswith(("tok", "vocab", "spiece", "sentencepiece", "tekken")) or name.endswith(".tiktoken")
        for name in names
    ):
        return "holds no tokenizer"
    indexes = sorted(name for name in names if name.endswith(".index.json"))
    if not indexes and not any(name.endswith((".safetensors", ".bin")) for name in names):
        return "holds no weights (*.safetensors or *.bin)"
    try:
        for index in indexes:
            told = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
            if gone := sorted(set(told) - names):
                return f"lacks {gone[0]}, which {index} names"
        for name in sorted(name for name in names if name.endswith(".safetensors")):
            size, told_size = (folder / name).stat().st_size, safetensors_size(folder / name)
            if size != told_size:
                return f"holds a {name} of {size:,} bytes, and its head speaks of {told_size:,}: it was cut short"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"holds weights that cannot be read: {type(error).__name__}: {str(error)[:200]}"
    return None


def safetensors_size(file: Path) -> int:
    """The size in bytes that a .safetensors file says it has: 8 bytes, the head as JSON, then the tensors.

    Source: the format's README, https://github.com/huggingface/safetensors#format.

    Raises:
        OSError, ValueError: it has no such head.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= 100_000_000:
            raise ValueError(f"{file.name} has no head")
        head = json.loads(stream.read(length))
    return 8 + length + max((row["data_offsets"][1] for key, row in head.items() if key != "__metadata__"), default=0)


def from_hub(name: str, revision: str | None) -> Path:
    """The local cache first, then the hub.

    Raises:
        ModelMissingError: not in the cache and not to be fetched.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelMissingError(f"{name}: huggingface_hub is not installed here; give a folder instead") from error
    keep = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "tokenizer*"]
    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=keep, local_files_only=True)
        )
    except Exception:
        pass  # not in the cache
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=keep))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelMissingError(
            f"{name}: not in the local cache, and the hub ({os.environ.get('HF_ENDPOINT', 'huggingface.co')}) gave "
            f"nothing ({type(error).__name__}: {reason}); give a folder, or set HF_ENDPOINT to a mirror"
        ) from error


def from_gguf(file: Path, folder: Path) -> Path:
    """A GGUF file as a normal folder, made with this environment's transformers.

    Raises:
        ModelMissingError: no such file, or the conversion failed (its last words).
    """
    if not file.is_file():
        raise ModelMissingError(f"{file} is not there")
    done = subprocess.run(
        [sys.executable, "-m", "envforge.verify.convert", str(file), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelMissingError(f"{file.name} could not be turned into a model folder: {words[-1] if words else '?'}")
    return folder


def marker(folder: Path) -> dict[str, Any]:
    """What envforge wrote beside a model of its own making, {} for any other."""
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def known_answer(folder: Path, prompt: str) -> str:
    """The word that this model is known to say to `prompt`, "" when nothing is known."""
    expect = marker(folder).get("expect")
    if isinstance(expect, dict) and expect.get("prompt") == prompt:
        return str(expect.get("contains") or "")
    return ""
