"""The buildah engine: for machines, and CI jobs, that build without podman; same store, same options as podman."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from envforge.ending import ended_as_exit
from envforge.image.engines import ImageInfo, Mount, RunResult
from envforge.image.engines.podman import (
    MISSING,
    PodmanEngine,
    Seen,
    cannot_run,
    environment,
    image_id,
    local_name,
    volume,
)
from envforge.image.engines.process import stream
from envforge.image.values import Event, Progress, silent


class BuildahEngine(PodmanEngine):
    """Talks to the buildah on PATH. BUILDAH_ISOLATION is respected: `chroot` needs no namespaces, but has no network
    of its own either, so commands in an image then see the machine's."""

    name = "buildah"
    package = "buildah"

    def version(self) -> str:
        self._about()
        return str(json.loads(self._call("version", "--json"))["version"])

    def _about(self) -> dict[str, Any]:
        data = json.loads(self._call("info"))
        return {"store": {"graphRoot": (data.get("store") or {}).get("GraphRoot")}}

    def _look(self, reference: str) -> Seen | None:
        done = self._try("inspect", "--type", "image", "--", reference)
        if done.returncode != 0:
            if MISSING.search(done.stderr):
                return None
            raise self._failed(done.stderr)
        data = json.loads(done.stdout)
        own, names, digests = image_id(data["FromImageID"]), [], []
        for row in json.loads(self._call("images", "--json", "--no-trunc")):
            if row["id"] == own:
                names += [local_name(str(name)) for name in row.get("names") or ()]
                digests += [f"{name.rpartition(':')[0]}@{row['digest']}" for name in row.get("names") or ()]
        config = (data.get("OCIv1") or {}).get("config") or {}
        labels = {str(key): str(value) for key, value in (config.get("Labels") or {}).items()}
        size = sum(int(layer["size"]) for layer in json.loads(data["Manifest"])["layers"])
        created = str((data.get("OCIv1") or {}).get("created") or "")
        return Seen(ImageInfo(own, tuple(names), labels, size, created), digests, tuple(config.get("Entrypoint") or ()))

    def run(
        self,
        reference: str,
        argv: list[str],
        *,
        mounts: tuple[Mount, ...] = (),
        network: str = "none",
        user: str | None = None,
        env: dict[str, str] | None = None,
        fetch: str | None = None,
        gpus: bool = False,
        progress: Progress = silent,
    ) -> RunResult:
        words = [f"--user={user}"] if user is not None else []
        words += [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        words += [word for mount in mounts for word in ("--volume", volume(mount))]
        seen = self._look(reference)
        entrypoint = list(seen.entrypoint) if seen is not None else []
        return self._inside(reference, words, [*entrypoint, *argv], network, fetch, progress)

    def ask(self, image: ImageInfo, argv: list[str]) -> RunResult:
        return self._inside(image.id, [], argv, "none")

    def _inside(
        self,
        reference: str,
        words: list[str],
        argv: list[str],
        network: str,
        fetch: str | None = None,
        progress: Progress = silent,
    ) -> RunResult:
        lines: list[str] = []

        def on_line(line: str) -> None:
            lines.append(line)
            progress(Event("line", line))

        if os.environ.get("BUILDAH_ISOLATION") == "chroot":
            network = "host"
        with ended_as_exit():
            container = self._call("from", "--pull-never", reference).strip().splitlines()[-1]
            try:
                command = [self.name, "run", f"--network={network}", *words, container, "--", *argv]
                done = stream(command, env=environment(), on_line=on_line)
                failed = next((line for line in lines if line.startswith("error running container:")), None)
                if done.code != 0 and failed is not None:
                    raise cannot_run(self.name, failed)
                found = None
                if fetch:
                    found = self._try_bytes("run", f"--network={network}", container, "--", "cat", fetch) or None
                return RunResult(done.code, "\n".join(lines), found, tuple(argv))
            finally:
                self._try("rm", container)

    def save(self, image: ImageInfo, path: Path) -> None:
        self._call("push", "--quiet", image.id, f"docker-archive:{path}")

    def load(self, path: Path) -> None:
        self._call("pull", "--quiet", f"docker-archive:{path}")
