"""Finds a docker client that can build with BuildKit here. Several may be on PATH, and the first need not be one."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from envforge.errors import EngineError

# Places beside PATH where an engine's own client usually is.
_USUAL = ("/usr/bin", "/usr/local/bin", "/snap/bin", "/opt/docker/bin")
OVERRIDE = "ENVFORGE_DOCKER"
# Docker 23 moved BuildKit's client side into the buildx plugin; older clients have it built in.
_BUILT_IN_UNTIL = 23


@dataclass(frozen=True, slots=True)
class DockerClient:
    """A client that works: its path, version, and whether it builds through buildx or by itself."""

    path: Path
    version: str
    buildx: bool


def candidates(path: str | None = None) -> list[Path]:
    """All docker clients of PATH and the usual places, in order, each file once; ENVFORGE_DOCKER replaces them all."""
    override = os.environ.get(OVERRIDE)
    if override:
        return [Path(override)]
    found: list[Path] = []
    seen: set[Path] = set()
    for folder in (*(path if path is not None else os.environ.get("PATH", "")).split(os.pathsep), *_USUAL):
        client = Path(folder or ".") / "docker"
        if client.is_file() and os.access(client, os.X_OK):
            real = client.resolve()
            if real not in seen:
                seen.add(real)
                found.append(client)
    return found


def probe(client: Path) -> DockerClient | str:
    """The client, or why it cannot build with BuildKit. Asks the client alone, never the engine."""
    version = _ask(client, "--version")
    match = re.search(r"version (\d+)\.(\S+?),?(\s|$)", version or "")
    if match is None:
        return f"{client} does not answer --version as docker does"
    number = f"{match[1]}.{match[2]}"
    if (_ask(client, "buildx", "version") or "").startswith("github.com/docker/buildx"):
        return DockerClient(client, number, True)
    if int(match[1]) < _BUILT_IN_UNTIL:
        return DockerClient(client, number, False)
    return f"{client} ({number}) has no buildx plugin, which it needs for BuildKit"


def _ask(client: Path, *words: str) -> str | None:
    try:
        answer = subprocess.run(
            [str(client), *words], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def find_client() -> DockerClient:
    """The first client that can build with BuildKit.

    Raises:
        EngineError: none can; says for each one why.
    """
    reasons = []
    for client in candidates():
        answer = probe(client)
        if isinstance(answer, DockerClient):
            return answer
        reasons.append(answer)
    if not reasons:
        raise EngineError(
            "no docker client was found, and BuildKit builds go through it",
            "install the docker client, or render with --dialect plain",
            id="no-docker-client",
        )
    raise EngineError(
        "no docker client here can build with BuildKit: " + "; ".join(reasons),
        f"install the buildx plugin, or name another client with {OVERRIDE}, or use --dialect plain",
        id="no-buildkit-client",
    )


def built_digests(metadata: Path) -> list[str]:
    """The digests of a finished build in buildx's metadata file, empty without one."""
    try:
        data = json.loads(metadata.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    found = (data.get(key) for key in ("containerimage.config.digest", "containerimage.digest"))
    return [str(digest) for digest in found if digest]
