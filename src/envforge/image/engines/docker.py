"""The docker engine: the docker SDK for everything it can do, the docker client for BuildKit builds."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
import tempfile
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.ending import ended_as_exit
from envforge.errors import EngineError, EnvforgeError, OutsideError
from envforge.image.context import write_context, write_secrets
from envforge.image.engines import EngineStatus, ImageInfo, Mount, RunResult, dockerstore
from envforge.image.engines.dockercli import built_digests, find_client
from envforge.image.engines.dockersdk import info, short, told, where
from envforge.image.engines.probe import probe_words, read_probe
from envforge.image.engines.process import stream
from envforge.image.engines.steps import BuildReader
from envforge.image.failures import explain
from envforge.image.values import LABEL_ADDRESS, BaseInfo, BuildContext, Event, Progress, silent

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container


class DockerEngine:
    """Talks to the engine that DOCKER_HOST or the current docker context names."""

    name = "docker"

    @cached_property
    def client(self) -> DockerClient:
        """The SDK's client.

        Raises:
            EngineError: no engine answers.
        """
        import docker
        from docker.errors import DockerException

        try:
            if os.environ.get("DOCKER_HOST"):
                client = docker.from_env()
            else:
                context = docker.ContextAPI.get_current_context()
                client = docker.DockerClient(base_url=context.Host, tls=context.TLSConfig or False)
            client.ping()
            return client
        except (DockerException, OSError, ValueError) as error:
            raise EngineError(
                f"no docker engine answers{where()}: {short(error)}",
                "start docker, point DOCKER_HOST or the docker context at an engine, or build with --engine venv",
                id="no-engine",
            ) from error

    def available(self) -> EngineStatus:
        try:
            version = str(self.client.version().get("Version", ""))
            return EngineStatus(True, version)
        except EngineError as error:
            return EngineStatus(False, reason=error.cause, hint=error.hint)
        except Exception as error:  # noqa: BLE001 - an engine that answers nonsense is not available either
            return EngineStatus(False, reason=f"the docker engine{where()} does not answer: {short(error)}")

    def base(self, ref: str, python: str, progress: Progress = silent) -> BaseInfo:
        with told():
            image = self._get(ref)
            if image is None:
                self._pull(ref, progress)
                image = self._get(ref)
            if image is None:
                raise OutsideError(f"the base image {ref} could not be had", "name one with --base REF", id="base")
            digests = [d for d in image.attrs.get("RepoDigests") or () if "@sha256:" in d]
            pinned = digests[0] if digests and "@" not in ref else ref
            digest = digests[0].split("@", 1)[1] if digests else str(image.id)
            answer = self._run_container(str(image.id), probe_words(python), entrypoint=True, network="none")
        return read_probe(ref, digest, answer.code, answer.output, named=pinned)

    def _get(self, ref: str) -> Any:
        from docker.errors import ImageNotFound

        try:
            return self.client.images.get(ref)
        except ImageNotFound:
            return None

    def _pull(self, ref: str, progress: Progress) -> None:
        from docker.errors import APIError
        from docker.utils import parse_repository_tag

        progress(Event("stage", f"fetching the base {ref}"))
        name, tag = parse_repository_tag(ref)
        try:
            for line in self.client.api.pull(name, tag=tag or "latest", stream=True, decode=True):
                if line.get("error"):
                    raise OutsideError(f"the base image {ref} could not be fetched: {line['error']}", id="base")
                progress(
                    Event("line", " ".join(str(line.get(key, "")) for key in ("id", "status", "progress")).strip())
                )
        except APIError as error:
            raise OutsideError(
                f"the base image {ref} is not here and could not be fetched: {short(error)}",
                "check its name and the network, or name an image that is here: --base REF",
                id="base",
            ) from error

    def find(self, label: str, value: str) -> tuple[ImageInfo, ...]:
        with told():
            images = [info(image) for image in self.client.images.list(filters={"label": f"{label}={value}"})]
        return tuple(image for image in images if any(name.startswith("envforge/") for name in image.names))

    def inspect(self, reference: str) -> ImageInfo | None:
        with told():
            image = self._get(reference)
            return info(image) if image is not None else None

    def build(self, context: BuildContext, log: Path, progress: Progress = silent) -> ImageInfo:
        _ = self.client  # an engine that is not there is told before anything is written
        with tempfile.TemporaryDirectory(prefix="envforge-context-") as folder:
            place = Path(folder) / "context"
            place.mkdir()
            progress(Event("stage", "putting the build context together"))
            write_context(context, place)
            if context.dialect == "plain":
                named = [self._build_plain(context, place, log, progress)]
            else:
                named = self._build_buildkit(context, place, Path(folder), log, progress)
        made = next((found for found in map(self.inspect, named) if found is not None), None)
        if made is None:
            raise EngineError("the engine reported a finished image that it does not have", "look at the engine's log")
        return made

    def _build_buildkit(
        self, context: BuildContext, place: Path, scratch: Path, log: Path, progress: Progress
    ) -> list[str]:
        """The ids that the new image may have: an engine on containerd's store goes by another digest than others."""
        client = find_client()
        iid, metadata = scratch / "iid", scratch / "metadata.json"
        argv = [str(client.path), "build", "--progress=plain", f"--iidfile={iid}"]
        for name, path in write_secrets(context.source, scratch).items():
            argv += ["--secret", f"id={name},src={path}"]
        network = context.network or self._default_network()
        if network:
            argv.append(f"--network={network}")
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"):
            if os.environ.get(name):
                argv += ["--build-arg", name]  # the value is read by the client; predefined names stay out of the image
        if client.buildx:
            argv += ["--load", "--provenance=false", f"--metadata-file={metadata}"]
        argv.append(str(place))
        reader = BuildReader(progress)
        try:
            done = stream(
                argv,
                env={**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain", "NO_COLOR": "1"},
                on_line=reader,
                log=log,
            )
        except OSError as error:
            raise EngineError(f"the docker client {client.path} could not be started: {error.strerror}") from error
        if done.code != 0 or not iid.is_file():
            raise self._failure(done.tail, log)
        return [iid.read_text(encoding="utf-8").strip(), *built_digests(metadata)]

    def _failure(self, tail: list[str], log: Path) -> EnvforgeError:
        error = explain(tail, log)
        # A dying engine can end a build with any words; what counts is whether it still answers.
        if not isinstance(error, EngineError) and not self._answers():
            return explain(["Cannot connect to the Docker daemon"], log)
        return error

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except Exception:  # noqa: BLE001 - whatever it is, it is no answer
            return False

    def _build_plain(self, context: BuildContext, place: Path, log: Path, progress: Progress) -> str:
        tail: deque[str] = deque(maxlen=400)
        image = ""
        with told(log, tail), log.open("a", encoding="utf-8") as out:
            network = context.network or self._default_network()
            answers = self.client.api.build(
                path=str(place), rm=True, forcerm=True, decode=True, network_mode=network or "default"
            )
            for answer in answers:
                text = str(answer.get("stream") or answer.get("error") or "").rstrip("\n")
                if text:
                    tail.append(text)
                    out.write(text + "\n")
                    progress(Event("stage" if text.startswith("Step ") else "line", text))
                if "error" in answer:
                    raise self._failure(list(tail), log)
                image = (answer.get("aux") or {}).get("ID", image)
        return image

    def _default_network(self) -> str | None:
        """Build steps need the index: on an engine without a bridge network only the host's network reaches it."""
        with told():
            return None if self.client.networks.list(names=["bridge"]) else "host"

    def tag(self, image: ImageInfo, reference: str) -> ImageInfo:
        with told():
            name, _, tag = (
                reference.rpartition(":") if ":" in reference.rsplit("/", 1)[-1] else (reference, "", "latest")
            )
            self.client.images.get(image.id).tag(name, tag=tag)
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
        with told(), ended_as_exit():
            return self._run_container(
                reference, argv, mounts=mounts, network=network, user=user, env=env, fetch=fetch, gpus=gpus,
                progress=progress,
            )  # fmt: skip

    def _run_container(
        self,
        reference: str,
        argv: list[str],
        *,
        entrypoint: bool = False,
        mounts: tuple[Mount, ...] = (),
        network: str = "none",
        user: str | None = None,
        env: dict[str, str] | None = None,
        fetch: str | None = None,
        gpus: bool = False,
        progress: Progress = silent,
    ) -> RunResult:
        from docker.types import DeviceRequest

        container = self.client.containers.create(
            reference,
            command=argv[1:] if entrypoint else argv,
            entrypoint=argv[:1] if entrypoint else None,
            network_mode=network,
            user=user,
            environment=env or {},
            volumes={str(m.source.resolve()): {"bind": m.target, "mode": "rw" if m.writable else "ro"} for m in mounts},
            # PyTorch's workers pass tensors through /dev/shm; docker's 64 MiB end in a bus error.
            shm_size="1g",
            device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if gpus else None,
        )
        try:
            container.start()
            for line in _lines(container):
                progress(Event("line", line))
            code = int(container.wait()["StatusCode"])
            # Read again when it is over: following a container that ends at once can miss what it said.
            said = "\n".join(container.logs().decode("utf-8", "replace").splitlines())
            return RunResult(code, said, _fetch(container, fetch) if fetch else None, tuple(argv))
        finally:
            with contextlib.suppress(Exception):
                container.remove(force=True, v=True)

    def ask(self, image: ImageInfo, argv: list[str]) -> RunResult:
        with told(), ended_as_exit():
            return self._run_container(image.id, argv, entrypoint=True)

    def images(self) -> tuple[ImageInfo, ...]:
        with told():
            return tuple(info(image) for image in self.client.images.list(filters={"label": LABEL_ADDRESS}))

    def pull(self, reference: str, progress: Progress = silent) -> ImageInfo:
        with told():
            return dockerstore.pull(self.client, reference, progress)

    def push(self, image: ImageInfo, reference: str, progress: Progress = silent) -> str:
        with told():
            return dockerstore.push(self.client, image, reference, progress)

    def remove(self, name: str) -> None:
        with told():
            dockerstore.remove(self.client, name)

    def save(self, image: ImageInfo, path: Path) -> None:
        with told():
            dockerstore.save(self.client, image, path)

    def load(self, path: Path) -> None:
        with told(), path.open("rb") as stream_:
            self.client.images.load(stream_)

    def free_space(self) -> int | None:
        """Bytes free where the engine keeps its layers; None for an engine on another machine."""
        if not str(self.client.api.base_url).startswith("http+docker://"):
            return None
        with told():
            root = self.client.info().get("DockerRootDir")
        return shutil.disk_usage(root).free if root and Path(root).is_dir() else None

    def build_cache(self) -> int:
        """Bytes of downloaded and unpacked packages that builds here can use again."""
        with told():
            rows = self.client.df().get("BuildCache") or ()
        return sum(int(row.get("Size") or 0) for row in rows if row.get("Type") == "exec.cachemount")

    def gpus(self) -> bool:
        """Can containers of this engine get at GPUs?"""
        with told():
            about = self.client.info()
        return "nvidia" in (about.get("Runtimes") or {}) or any(
            str(device.get("ID", "")).startswith("nvidia.com/gpu") for device in about.get("DiscoveredDevices") or ()
        )


def _lines(container: Container) -> Iterator[str]:
    rest = b""
    for block in container.logs(stream=True, follow=True):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", "replace")


def _fetch(container: Container, path: str) -> bytes | None:
    from docker.errors import NotFound

    try:
        blocks, _ = container.get_archive(path)
    except NotFound:
        return None
    with tarfile.open(fileobj=io.BytesIO(b"".join(blocks))) as archive:
        for member in archive:
            stream = archive.extractfile(member)
            if stream is not None:
                return stream.read()
    return None
