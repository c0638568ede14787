"""Images into and out of a docker engine: registries, archives, removal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from envforge.errors import DiskFullError, EngineError, OutsideError
from envforge.files import no_space
from envforge.image.engines import ImageInfo
from envforge.image.engines.dockersdk import info, short
from envforge.image.registry import parse_reference, refusal
from envforge.image.values import Event, Progress

if TYPE_CHECKING:
    from docker import DockerClient


def pull(client: DockerClient, reference: str, progress: Progress) -> ImageInfo:
    """Fetch an image.

    Raises:
        RegistryError: refused or unreachable.
    """
    from docker.errors import APIError

    where = parse_reference(reference)
    repository = f"{where.host}/{where.path}"
    progress(Event("stage", f"fetching {reference}"))
    try:
        for line in client.api.pull(repository, tag=where.digest or where.tag, stream=True, decode=True):
            if line.get("error"):
                raise refusal(reference, "could not be fetched", str(line["error"]))
            _tell(line, progress)
        return info(client.images.get(str(where)))
    except APIError as error:
        raise refusal(reference, "could not be fetched", short(error)) from error


def push(client: DockerClient, image: ImageInfo, reference: str, progress: Progress) -> str:
    """Send an image; the digest is the registry's own answer.

    Raises:
        RegistryError: refused or unreachable; the second name is taken back, the image stays.
    """
    from docker.errors import APIError

    where = parse_reference(reference)
    repository = f"{where.host}/{where.path}"
    known = reference in image.names
    client.images.get(image.id).tag(repository, tag=where.tag)
    progress(Event("stage", f"pushing {reference}"))
    digest = ""
    try:
        for line in client.api.push(repository, tag=where.tag, stream=True, decode=True):
            if line.get("error"):
                raise refusal(reference, "could not be pushed", str(line["error"]))
            digest = str((line.get("aux") or {}).get("Digest") or digest)
            _tell(line, progress)
    except APIError as error:
        raise refusal(reference, "could not be pushed", short(error)) from error
    finally:
        # Only a name for the way: what is kept here goes by its own name.
        if not known:
            remove(client, f"{repository}:{where.tag}")
    if not digest.startswith("sha256:"):
        raise EngineError(f"{reference} was pushed, but the engine names no digest", "push it again")
    return digest


def remove(client: DockerClient, name: str) -> None:
    """Take a name or an image away; what is not there is no failure.

    Raises:
        EngineError: a container uses it.
    """
    from docker.errors import APIError, ImageNotFound

    try:
        client.images.remove(name)
    except ImageNotFound:
        return
    except APIError as error:
        if error.status_code != 409:
            raise
        raise EngineError(f"{name} is in use: {short(error)}", "end its containers first", id="in-use") from error


def save(client: DockerClient, image: ImageInfo, path: Path) -> None:
    """Write an archive that `docker load` and skopeo read.

    Raises:
        DiskFullError, OutsideError: it cannot be written.
    """
    try:
        with path.open("xb") as out:
            for block in client.images.get(image.id).save(chunk_size=2**20):
                out.write(block)
    except OSError as error:
        if no_space(error):
            raise DiskFullError(f"the disk filled up while writing {path.parent}", "free some space") from error
        raise OutsideError(f"cannot write {path}: {error.strerror or error}") from error


def _tell(line: dict[str, object], progress: Progress) -> None:
    words = (str(line.get(key) or "") for key in ("id", "status", "progress"))
    progress(Event("line", " ".join(word for word in words if word)))
