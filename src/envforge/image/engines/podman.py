"""The podman engine: podman's own command line, root or rootless. Its store is what its configuration files say."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from envforge.ending import ended_as_exit
from envforge.errors import EngineError, OutsideError, UsageError
from envforge.image.context import write_context, write_secrets
from envforge.image.engines import EngineStatus, ImageInfo, Mount, RunResult
from envforge.image.engines.keyed import key_mounts
from envforge.image.engines.probe import probe_words, read_probe
from envforge.image.engines.process import stream
from envforge.image.engines.steps import BuildReader
from envforge.image.failures import explain
from envforge.image.registry import is_loopback, parse_reference, refusal
from envforge.image.values import LABEL_ADDRESS, BaseInfo, BuildContext, Event, Progress, silent

_LOCAL = "localhost/"  # what these tools put before a name without a registry
MISSING = re.compile(r"image not known|no such image|unable to find|could not find image", re.I)
_IN_USE = re.compile(r"in use|image used by", re.I)
_NOT_RUN = (125, 126, 127)  # podman's own codes; a command inside may end with them too
_CDI = ("/etc/cdi", "/var/run/cdi")


class PodmanEngine:
    """Talks to the podman on PATH."""

    name = "podman"
    package = "podman"

    def available(self) -> EngineStatus:
        if shutil.which(self.name) is None:
            return EngineStatus(
                False, reason=f"{self.name} is not installed", hint=f"install the package {self.package}"
            )
        try:
            return EngineStatus(True, self.version())
        except EngineError as error:
            return EngineStatus(False, reason=error.cause, hint=error.hint)

    def version(self) -> str:
        """Its version; asking shows that the store can be used, too."""
        return str(self._about()["version"]["Version"])

    def _about(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._call("info", "--format", "json"))
        return found

    def base(self, ref: str, python: str, progress: Progress = silent) -> BaseInfo:
        image = self._look(ref)
        if image is None:
            where = parse_reference(ref)
            progress(Event("stage", f"fetching the base {ref}"))
            # In full: which registries a short name is tried in is another setting on every machine.
            ref = str(where) if where.digest is None else where.at(where.digest)
            done = self._try("pull", "--quiet", *self._transport(where.host), ref)
            if done.returncode != 0:
                raise OutsideError(
                    f"the base image {ref} is not here and could not be fetched: {_last(done.stderr)}",
                    "check its name and the network, or name an image that is here: --base REF",
                    id="base",
                )
            image = self._look(ref)
        if image is None:
            raise OutsideError(f"the base image {ref} could not be had", "name one with --base REF", id="base")
        digests = [d for d in image.digests if not d.startswith(_LOCAL)]
        answer = self.ask(image.info, probe_words(python))
        pinned = digests[0] if digests and "@" not in ref else ref
        digest = digests[0].split("@", 1)[1] if digests else image.info.id
        return read_probe(ref, digest, answer.code, answer.output, named=pinned)

    def find(self, label: str, value: str) -> tuple[ImageInfo, ...]:
        found = self._list(f"{label}={value}")
        return tuple(image for image in found if any(name.startswith("envforge/") for name in image.names))

    def images(self) -> tuple[ImageInfo, ...]:
        return self._list(LABEL_ADDRESS)

    def _list(self, label: str) -> tuple[ImageInfo, ...]:
        ids = dict.fromkeys(self._call("images", "--quiet", "--no-trunc", "--filter", f"label={label}").split())
        return tuple(image for image in map(self.inspect, ids) if image is not None)

    def inspect(self, reference: str) -> ImageInfo | None:
        found = self._look(reference)
        return found.info if found is not None else None

    def _look(self, reference: str) -> Seen | None:
        done = self._try("image", "inspect", "--format", "json", "--", reference)
        if done.returncode != 0:
            if MISSING.search(done.stderr):
                return None
            raise self._failed(done.stderr)
        data = json.loads(done.stdout)[0]
        names = tuple(local_name(str(name)) for name in data.get("RepoTags") or ())
        labels = {str(k): str(v) for k, v in (data.get("Labels") or {}).items()}
        info = ImageInfo(
            image_id(data["Id"]), names, labels, int(data.get("Size") or 0), str(data.get("Created") or "")
        )
        return Seen(info, [str(digest) for digest in data.get("RepoDigests") or ()])

    def build(self, context: BuildContext, log: Path, progress: Progress = silent) -> ImageInfo:
        with tempfile.TemporaryDirectory(prefix="envforge-context-") as folder:
            place = Path(folder) / "context"
            place.mkdir()
            progress(Event("stage", "putting the build context together"))
            write_context(context, place)
            key_mounts(place)
            iid = Path(folder) / "iid"
            argv = [self.name, "build", "--layers", f"--iidfile={iid}", f"--file={place / 'Dockerfile'}"]
            if context.dialect == "buildkit":
                for name, path in write_secrets(context.source, Path(folder)).items():
                    argv += ["--secret", f"id={name},src={path}"]
            argv += [f"--network={context.network or 'host'}", str(place)]
            try:
                done = stream(argv, env=environment(), on_line=BuildReader(progress), log=log)
            except OSError as error:
                raise EngineError(f"{self.name} could not be started: {error.strerror}", id="no-engine") from error
            if done.code != 0 or not iid.is_file():
                raise explain(done.tail, log)
            made = self.inspect(image_id(iid.read_text(encoding="utf-8").strip()))
        if made is None:
            raise EngineError(f"{self.name} reported a finished image that it does not have")
        return made

    def tag(self, image: ImageInfo, reference: str) -> ImageInfo:
        self._call("tag", image.id, reference)
        found = self.inspect(image.id)
        if found is None:
            raise EngineError(f"the image {image.id} vanished while it was given its name")
        return found

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
        words = [f"--network={network}", "--shm-size=1g", "--security-opt=label=disable"]
        words += [f"--user={user}"] if user is not None else []
        words += [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        words += [word for mount in mounts for word in ("--volume", volume(mount))]
        words += ["--device=nvidia.com/gpu=all"] if gpus else []
        return self._run_container([*words, reference], argv, fetch, progress)

    def ask(self, image: ImageInfo, argv: list[str]) -> RunResult:
        return self._run_container([f"--entrypoint={json.dumps(argv[:1])}", "--network=none", image.id], argv[1:])

    def _run_container(
        self, words: list[str], argv: list[str], fetch: str | None = None, progress: Progress = silent
    ) -> RunResult:
        lines: list[str] = []

        def on_line(line: str) -> None:
            lines.append(line)
            progress(Event("line", line))

        with ended_as_exit():
            container = self._call("create", *words, *argv).strip().splitlines()[-1]
            try:
                done = stream([self.name, "start", "--attach", container], env=environment(), on_line=on_line)
                if done.code in _NOT_RUN and lines and lines[-1].startswith("Error:"):
                    raise cannot_run(self.name, lines[-1])
                found = _first(self._try_bytes("cp", f"{container}:{fetch}", "-")) if fetch else None
                return RunResult(done.code, "\n".join(lines), found, tuple(argv))
            finally:
                self._try("rm", "--force", "--volumes", "--time=0", container)

    def pull(self, reference: str, progress: Progress = silent) -> ImageInfo:
        progress(Event("stage", f"fetching {reference}"))
        where = parse_reference(reference)
        done = self._try("pull", "--quiet", *self._transport(where.host), str(where))
        if done.returncode != 0:
            raise refusal(reference, "could not be fetched", _last(done.stderr))
        found = self.inspect(str(where))
        if found is None:
            raise EngineError(f"{reference} was fetched, and {self.name} does not have it")
        return found

    def push(self, image: ImageInfo, reference: str, progress: Progress = silent) -> str:
        progress(Event("stage", f"pushing {reference}"))
        where = parse_reference(reference)
        with tempfile.TemporaryDirectory(prefix="envforge-push-") as folder:
            file = Path(folder) / "digest"
            words = [*self._transport(where.host), "--digestfile", str(file), image.id, f"docker://{where}"]
            done = self._try("push", *words)
            if done.returncode != 0:
                raise refusal(reference, "could not be pushed", _last(done.stderr))
            return file.read_text(encoding="utf-8").strip()

    def remove(self, name: str) -> None:
        done = self._try("rmi", name)
        if done.returncode != 0 and not MISSING.search(done.stderr):
            if _IN_USE.search(done.stderr):
                hint = "remove its containers first, those of stopped builds too: podman ps --all --external"
                raise EngineError(f"{name} is in use: {_last(done.stderr)}", hint, id="in-use")
            raise self._failed(done.stderr)

    def save(self, image: ImageInfo, path: Path) -> None:
        self._call("save", "--quiet", "--format=docker-archive", f"--output={path}", image.id)

    def load(self, path: Path) -> None:
        self._call("load", "--quiet", f"--input={path}")

    def free_space(self) -> int | None:
        root = str((self._about().get("store") or {}).get("graphRoot") or "")
        return shutil.disk_usage(root).free if root and Path(root).is_dir() else None

    def gpus(self) -> bool:
        """GPUs come through the container device interface: a description of NVIDIA's devices."""
        return any(list(Path(folder).glob("nvidia*")) for folder in _CDI if Path(folder).is_dir())

    def _transport(self, host: str) -> list[str]:
        """Options for a registry: plain HTTP on this machine as docker allows it, and docker's own credentials."""
        words = ["--tls-verify=false"] if is_loopback(host) else []
        config = os.environ.get("DOCKER_CONFIG")
        if config and not os.environ.get("REGISTRY_AUTH_FILE") and (Path(config) / "config.json").is_file():
            words.append(f"--authfile={Path(config) / 'config.json'}")
        return words

    def _call(self, *words: str) -> str:
        done = self._try(*words)
        if done.returncode != 0:
            raise self._failed(done.stderr)
        return done.stdout

    def _try(self, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self.name, *words],
                env=environment(),
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except OSError as error:
            raise EngineError(f"{self.name} could not be started: {error.strerror}", id="no-engine") from error

    def _try_bytes(self, *words: str) -> bytes:
        argv = [self.name, *words]
        done = subprocess.run(argv, env=environment(), capture_output=True, stdin=subprocess.DEVNULL, check=False)
        return done.stdout if done.returncode == 0 else b""

    def _failed(self, said: str) -> OutsideError:
        if re.search(r"no space left on device|disk quota exceeded", said, re.I):
            found = explain(said.splitlines())
            assert isinstance(found, OutsideError)
            return found
        return EngineError(f"{self.name} failed: {_last(said)}", id="engine-refused")


class Seen:
    """An image, and the names by digest that it has from registries."""

    def __init__(self, info: ImageInfo, digests: list[str], entrypoint: tuple[str, ...] = ()) -> None:
        self.info = info
        self.digests = digests
        self.entrypoint = entrypoint


def cannot_run(name: str, said: str) -> EngineError:
    """The error where the runtime below fails, which is no fault of the image."""
    hint = "look at its runtime and limits (containers.conf), or build with --engine docker or --engine venv"
    return EngineError(f"{name} cannot run a container here: {_last(said)}", hint, id="engine-refused")


def environment() -> dict[str, str]:
    """Ours, but buildah refuses every command where DOCKER_CONFIG names a folder without a config.json."""
    found = dict(os.environ)
    config = found.get("DOCKER_CONFIG")
    if config and not (Path(config) / "config.json").is_file():
        del found["DOCKER_CONFIG"]
    return found


def image_id(text: str) -> str:
    """The id as docker writes it."""
    return text if text.startswith("sha256:") else f"sha256:{text}"


def local_name(name: str) -> str:
    """The name as docker writes it: without the host that stands for 'no registry'."""
    return name.removeprefix(_LOCAL)


def volume(mount: Mount) -> str:
    """A mount as an option's value."""
    source = str(mount.source.resolve())
    if ":" in source:
        raise UsageError(f"{source} cannot be mounted: its path holds a colon", "give it through a path without one")
    return f"{source}:{mount.target}:{'rw' if mount.writable else 'ro'}"


def _last(said: str) -> str:
    """The failure's own line, without the tool's time stamps."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Error")] or lines
    return re.sub(r"^Error: *|time=\"[^\"]*\" level=\w+ msg=", "", told[-1])[:400] if told else "no reason given"


def _first(archive: bytes) -> bytes | None:
    """The first file of a tar."""
    with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            found = tar.extractfile(member)
            if found is not None:
                return found.read()
    return None
