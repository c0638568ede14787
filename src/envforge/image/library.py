"""The images that were built: what each one is, which hosts it suits, and which nobody needs any more."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.errors import DataError
from envforge.image.engines import ImageInfo
from envforge.image.proofs import get_proof
from envforge.image.registry import Registry, RegistryError, Remote, in_registry
from envforge.image.render import unpack_plan
from envforge.image.state import folder_of, proof_of, users
from envforge.image.values import (
    LABEL_ADDRESS,
    LABEL_DRIVER_FLOOR,
    LABEL_PLAN,
    LABEL_PLAN_HASH,
    LABEL_PYTHON,
    LABEL_SM,
    LABEL_STACK,
    LABEL_TORCH,
    LABEL_VARIANT,
)
from envforge.resolver.check import judge
from envforge.resolver.hosts import Host, key
from envforge.resolver.plan import Plan, load_plan

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

OURS = "envforge/"
_TAG = re.compile(r"[A-Za-z0-9_.]+-(cpu|cu\d+)-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Book:
    """One image as its labels tell it. `name`: the one that says it is finished, None without it; in a registry
    (`remote`) its reference by digest."""

    image: ImageInfo
    proof: str | None = None
    projects: tuple[Path, ...] = ()
    remote: str | None = None

    @property
    def name(self) -> str | None:
        if self.remote is not None:
            return self.remote
        return next((name for name in self.image.names if name.startswith(OURS)), None)

    @property
    def address(self) -> str:
        return self.image.labels.get(LABEL_ADDRESS, "")

    @property
    def kind(self) -> tuple[str, str]:
        """Stack and variant: of these the newest is the one in use."""
        return self.image.labels.get(LABEL_STACK, ""), self.image.labels.get(LABEL_VARIANT, "")

    def to_json(self) -> dict[str, Any]:
        labels = self.image.labels
        return {
            "reference": self.name,
            "names": list(self.image.names),
            "digest": self.image.id,
            "address": self.address,
            "stack": labels.get(LABEL_STACK),
            "torch": labels.get(LABEL_TORCH),
            "variant": labels.get(LABEL_VARIANT),
            "python": labels.get(LABEL_PYTHON),
            "sm": [word for word in labels.get(LABEL_SM, "").split(",") if word],
            "driver_floor": labels.get(LABEL_DRIVER_FLOOR) or None,
            "size": self.image.size,
            "created": self.image.created or None,
            "proof": self.proof,
            "projects": [str(path) for path in self.projects],
        }


def shelve(images: Sequence[ImageInfo], state: Path) -> tuple[Book, ...]:
    """The images with what is kept of them, newest first.

    Args:
        state: the folder that holds one folder per address.
    """
    books = []
    for image in images:
        address = image.labels.get(LABEL_ADDRESS, "")
        place = folder_of(state, address)
        books.append(Book(image, proof_of(place), users(place, address)))
    return tuple(sorted(books, key=lambda book: (book.image.created, book.image.id), reverse=True))


def in_registry_books(registry: str, stacks: Iterable[str]) -> tuple[Book, ...]:
    """The images of ours that a registry has of these stacks, newest first; tags of other kinds are passed over.

    Raises:
        RegistryError: no answer, or a refusal. DataError: `registry` is not one.
    """
    books = []
    client: Registry | None = None
    for stack in dict.fromkeys(stacks):
        where = in_registry(registry, f"{OURS}{stack}:any")
        client = client or Registry(where.host)
        for tag in client.tags(where):
            if not _TAG.fullmatch(tag):
                continue
            found = client.find(replace(where, tag=tag))
            address = found.labels.get(LABEL_ADDRESS, "") if found is not None else ""
            if found is not None and address and tag.endswith(f"-{address[:12]}"):
                image = ImageInfo(found.config, (str(found.reference),), found.labels, found.size, found.created)
                books.append(Book(image, _proof(client, found), remote=where.at(found.digest)))
    return tuple(sorted(books, key=lambda book: (book.image.created, book.image.id), reverse=True))


def _proof(client: Registry, found: Remote) -> str | None:
    """The grade of the receipt beside an image; a registry that lets nobody ask has none."""
    try:
        receipt = get_proof(client, found)
    except RegistryError:
        return None
    return str(receipt["grade"]) if receipt is not None else None


def plan_of(labels: dict[str, str], where: str) -> Plan | None:
    """The plan that an image carries, None where it carries none.

    Raises:
        DataError: the label is damaged, or not the plan whose hash stands beside it.
    """
    if LABEL_PLAN not in labels:
        return None
    plan = load_plan(unpack_plan(labels[LABEL_PLAN]), f"the plan label of {where}")
    if labels.get(LABEL_PLAN_HASH) not in (None, plan.hash()):
        raise DataError(f"the plan label of {where} is not the plan that its hash names", "build the image again")
    return plan


def unsuited(plan: Plan, labels: dict[str, str], host: Host, matrix: Matrix) -> tuple[str, ...]:
    """Why an image does not run on a host as it should; empty where it does.

    The labels' driver floor is asked first; GPU code and all else by the same rules as `envforge check`.
    """
    found: list[str] = []
    if host.arch != plan.target.arch:
        found.append(f"built for {plan.target.arch}, and the host is {host.arch}")
    if plan.variant == "cpu":
        return (*found, "a CPU build, and the host has a GPU") if host.has_gpu else tuple(found)
    if not host.has_gpu:
        return (*found, f"built for CUDA ({plan.variant}), and the host has no GPU")
    floor = labels.get(LABEL_DRIVER_FLOOR) or plan.target.driver_floor
    if floor and host.driver is not None and key(host.driver) < key(floor):
        found.append(f"needs driver {floor} or newer, and the host has {host.driver}")
        return tuple(found)
    # An image brings its own C library.
    inside = replace(host, glibc=plan.target.glibc)
    verdict = judge(matrix, plan.pins, (inside,), plan.python, plan.variant)
    return (*found, *(statement.text for statement in verdict.broken))


@dataclass(frozen=True, slots=True)
class Unused:
    """An image that nobody needs, and why that is so."""

    book: Book
    why: str


def unused(books: Sequence[Book], every: bool = False) -> tuple[Unused, ...]:
    """What may go: what never got a name, and what a newer image of its stack and variant replaced.

    What a project names in its build.json, or what has a name that somebody else gave, stays.

    Args:
        books: newest first, as `shelve` gives them.
        every: the newest of each stack and variant goes too.
    """
    found: list[Unused] = []
    seen: dict[tuple[str, str], str] = {}
    for book in books:
        if any(_given(name, book.name) for name in book.image.names) or book.projects:
            seen.setdefault(book.kind, book.image.created)
        elif book.name is None:
            found.append(Unused(book, "has no name: it did not pass its proof, or was stopped before it"))
        elif every:
            found.append(Unused(book, "no project uses it"))
        elif seen.get(book.kind, book.image.created) > book.image.created:
            found.append(Unused(book, "a newer image of its stack is there, and no project uses it"))
        else:
            seen.setdefault(book.kind, book.image.created)
    return tuple(found)


def _given(name: str, own: str | None) -> bool:
    """Did a person give this name? Ours, and the same below a registry, are made again by whoever needs them."""
    return not name.startswith(OURS) and not (own is not None and name.endswith("/" + own.removeprefix(OURS)))
