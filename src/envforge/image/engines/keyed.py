"""Makes a step's text say what its mounts hold, for builders that look at the text alone.

buildah (1.28, and so podman 4.3) finds a finished step in its cache by the instruction's text; what a bind mount shows
does not count. Another lock with the same text would then get the first one's packages, under labels of its own. So
each mounted folder is renamed to carry the hash of its content, and the text changes with it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_SOURCE = re.compile(r"(?<=--mount=type=bind,source=)build/[^,\s]+")
_FROM_COMPILE = "--mount=type=bind,from=compile,"
_COMPILE_PART = "build/parts/compile"


def key_mounts(folder: Path) -> None:
    """Rename what the Dockerfile in a context folder mounts, and the mounts with it."""
    file = folder / "Dockerfile"
    text = file.read_text(encoding="utf-8")
    if _FROM_COMPILE in text:
        # What the compile stage makes follows from its part: shown beside it, it makes that step's text its own too.
        shown = f"--mount=type=bind,source={_COMPILE_PART},target=/run/envforge/parts/compile \\\n    {_FROM_COMPILE}"
        text = text.replace(_FROM_COMPILE, shown)
    for source in sorted(set(_SOURCE.findall(text)), key=len, reverse=True):
        place = folder / source
        keyed = f"{source}-{tree_hash(place)[:16]}"
        place.rename(folder / keyed)
        text = re.sub(rf"(?<=--mount=type=bind,source={re.escape(source)})(?=[,\s])", keyed[len(source) :], text)
    file.write_text(text, encoding="utf-8")


def tree_hash(folder: Path) -> str:
    """Hex SHA-256 over names and content. A wheel counts by name and size: its own hash stands in the requirements."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        if path.is_file():
            own = str(path.stat().st_size).encode() if path.suffix == ".whl" else path.read_bytes()
            found.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o111}\0{len(own)}\0".encode() + own)
    return found.hexdigest()
