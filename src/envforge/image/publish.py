"""Images of ours in a registry: is it there already, and if not, put it there; the digest is what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envforge.errors import UsageError
from envforge.image.artifacts import attach
from envforge.image.engines import ContainerEngine, Engine, ImageInfo, container_engine
from envforge.image.proofs import get_proof, put_proof
from envforge.image.registry import HUB, Reference, Registry, RegistryError, Remote, in_registry, parse_reference
from envforge.image.values import LABEL_ADDRESS, BuildOptions, Event, Progress, silent

BILL = "application/vnd.cyclonedx+json"  # as CycloneDX registered it


class Shelf:
    """The registry of one build: where its image belongs there, and what is there now.

    Args:
        registry: host and path, `registry.example/team`.
        tag: the local name, `envforge/STACK:TORCH-VARIANT-HASH`; its parts are the name there too.
    """

    def __init__(self, registry: str, tag: str, address: str) -> None:
        self.reference: Reference = in_registry(registry, tag)
        self.address = address
        self.client = Registry(self.reference.host)

    def find(self) -> Remote | None:
        """What is there under our name, if it says that it is the same: the tag holds a part of the address only.

        Raises:
            RegistryError: no answer, or a refusal.
        """
        remote = self.client.find(self.reference)
        return remote if remote is not None and remote.labels.get(LABEL_ADDRESS) == self.address else None

    def proof(self, remote: Remote) -> dict[str, Any] | None:
        """The receipt beside what is there; None where there is none, or it cannot be had."""
        try:
            return get_proof(self.client, remote)
        except RegistryError:
            return None

    def look(self, pushing: bool, progress: Progress = silent) -> tuple[Remote | None, str | None]:
        """Before a build: what is there, or a warning where that cannot be known.

        A registry that says no is no reason not to build: it may hide what is not there yet, or let one push only.

        Raises:
            RegistryError: the image shall be pushed there and nobody answers: told before the work, not after it.
        """
        progress(Event("stage", f"looking in {self.reference.host}"))
        try:
            return self.find(), None
        except RegistryError as error:
            if pushing and not error.denied:
                raise RegistryError(
                    error.cause, f"{error.hint}; nothing was built, and without --push it would be".lstrip("; ")
                ) from error
            progress(Event("stage", f"note: {error.cause}"))
            return None, error.cause

    def put(
        self, engine: ContainerEngine, image: ImageInfo, progress: Progress = silent, *, over: bool = False
    ) -> dict[str, Any]:
        """Push what is not there yet; returns what `build.json` keeps of it.

        What is there stays unless `over`: the same plan built twice has other bytes, and the first may be in use.

        Raises:
            RegistryError: refused or unreachable; the local image keeps its name.
        """
        try:
            there = None if over else self.find()
        except RegistryError as error:
            if not error.denied:
                raise _kept(error, image) from error
            there = None
        if there is not None:
            progress(Event("stage", f"{self.reference} is there already"))
            return record(there.reference, there.digest, pushed=False)
        try:
            digest = engine.push(image, str(self.reference), progress)
        except RegistryError as error:
            raise _kept(error, image) from error
        return record(self.reference, digest, pushed=True)


def record(where: Reference, digest: str, *, pushed: bool) -> dict[str, Any]:
    """What is kept of an image in a registry: its reference there, its digest, and the two in one word."""
    return {"reference": str(where), "digest": digest, "image": where.at(digest), "pushed": pushed}


def _kept(error: RegistryError, image: ImageInfo) -> RegistryError:
    name = next((name for name in image.names if name.startswith("envforge/")), image.id)
    hint = f"{error.hint}; the image is here as {name}: run the same again to push it".lstrip("; ")
    return RegistryError(error.cause, hint, denied=error.denied)


def shelf_for(options: BuildOptions, engine: Engine, tag: str, address: str) -> Shelf | None:
    """The registry that a build looks in, None where it has none.

    Raises:
        UsageError: something shall be pushed, and the engine makes no images or no registry is known.
        DataError: the registry's name is none.
    """
    if options.push:
        container_engine(engine)
    if options.registry is not None and engine.name != "venv":
        return Shelf(options.registry, tag, address)
    if options.push and (options.tag is None or parse_reference(options.tag).host == HUB):
        raise UsageError(
            "no registry is known to push to",
            "name one with --registry registry.example/team, or in the settings (see envforge config show)",
        )
    return None


def publish(
    options: BuildOptions,
    engine: Engine,
    shelf: Shelf | None,
    image: ImageInfo,
    progress: Progress,
    proof: Mapping[str, Any] | None = None,
    bill: Path | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Push under our own name and under the one that `--tag` gave, where that names a registry; receipt and bill of
    materials beside it.

    Returns:
        What `build.json` keeps of it, and warnings: a registry that takes no artifacts has the image all the same.

    Raises:
        RegistryError: refused or unreachable; the image here keeps its names.
    """
    container = container_engine(engine)
    told: str | None = None
    found = shelf.put(container, image, progress, over=options.rebuild) if shelf is not None else None
    second = parse_reference(options.tag) if options.tag is not None else None
    if second is not None and second.host != HUB:
        try:
            digest = container.push(image, str(second), progress)
        except RegistryError as error:
            raise _kept(error, image) from error
        other = record(second, digest, pushed=True)
        told = _accompany(other, image, proof, bill, progress) if found is not None else None
        found = found or other
    assert found is not None
    return found, tuple(filter(None, (_accompany(found, image, proof, bill, progress), told)))


def _accompany(
    found: dict[str, Any], image: ImageInfo, proof: Mapping[str, Any] | None, bill: Path | None, progress: Progress
) -> str | None:
    """Put receipt and bill of materials beside the image in the registry; `found` gets the digests of what is there.

    Returns a warning, or None: the image is there either way.
    """
    if proof is None and bill is None:
        return None
    where, warning = parse_reference(found["image"]), None
    progress(Event("stage", f"putting beside it what is known of it, in {where.host}"))
    try:
        client = Registry(where.host)
        remote = client.find(where)
        if remote is None or image.id not in (remote.config, remote.digest):
            warning = f"{found['image']} is another build of the same plan: receipt and list of this one stay here"
        else:
            if proof is not None:
                found["proof"] = put_proof(client, remote, proof)
            if bill is not None:
                found["sbom"] = attach(client, remote, BILL, bill.name, bill.read_bytes())
    except RegistryError as error:
        warning = f"the image is there, and not what is known of it: {error.cause}"
    if warning is not None:
        progress(Event("stage", f"note: {warning}"))
    return warning
