"""The ready-made stacks on their declared hosts: do they resolve, and what changes between two states of the matrix?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.errors import DataError, EnvforgeError
from envforge.matrix.check import Finding
from envforge.matrix.releases import Release, load_releases
from envforge.resolver.hosts import known
from envforge.resolver.resolve import Options, Wish, resolve
from envforge.spec import IMAGES, find_spec, load_spec, spec_names

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix
    from envforge.spec import Spec

Loader = Callable[[str], tuple[Release, ...]]


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """One stack on one of its hosts. `pins` is None, and `text` says why, where it does not resolve."""

    image: str
    host: str
    pins: dict[str, str] | None
    variant: str = ""
    python: str = ""
    text: str = ""

    @property
    def place(self) -> str:
        """ "unsloth on rtx5090-driver-580" """
        return f"{self.image} on {self.host}"


def image_answers(matrix: Matrix, load: Loader = load_releases, images: Path = IMAGES) -> list[ImageAnswer]:
    """Every stack on every host that it declares, each on its own.

    Raises:
        DataError: an image.yaml is malformed.
    """
    found = []
    for name in spec_names(images):
        spec = load_spec(find_spec(name, images))
        found += [_answer(matrix, spec, name, position, load) for position in range(len(spec.hosts))]
    return found


def _answer(matrix: Matrix, spec: Spec, name: str, position: int, load: Loader) -> ImageAnswer:
    declared = spec.hosts[position]
    try:
        host = known(declared, matrix)
        cpu = not host.has_gpu
        options = Options(pythons=spec.pythons_for(cpu))
        answer = resolve(matrix, Wish(spec.requests_for(cpu), (host,), options), load)
    except EnvforgeError as error:
        return ImageAnswer(name, declared.name, None, text=error.cause)
    if answer.plan is None:
        text = answer.conflict.text if answer.conflict else ""
        return ImageAnswer(name, declared.name, None, text=text)
    return ImageAnswer(name, declared.name, answer.plan.pins, answer.plan.variant, answer.plan.python)


def check_images(matrix: Matrix, load: Loader = load_releases, images: Path = IMAGES) -> list[Finding]:
    """A finding for each stack without hosts, and for each host on which one does not resolve."""
    found = []
    for name in spec_names(images):
        path = find_spec(name, images)
        where = f"images/{name}/{path.name}"
        try:
            spec = load_spec(path)
        except DataError as error:
            found.append(Finding("image", where, 1, "", error.cause, error.hint))
            continue
        if not spec.hosts:
            do = "declare the hosts that it is for, and cpu"
            found.append(Finding("image", where, 1, "", "declares no hosts", do))
        for position, host in enumerate(spec.hosts):
            answer = _answer(matrix, spec, name, position, load)
            if answer.pins is None:
                row = f"hosts {position + 1} ({host.name})"
                what = f"does not resolve: {answer.text}"
                do = "correct the row that refuses it, or the stack's requests or hosts"
                found.append(Finding("image", where, _line_of(path, host.name), row, what, do))
    return found


def _line_of(path: Path, name: str) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if f"name: {name}" in line), 1)


def changes(before: Sequence[ImageAnswer], after: Sequence[ImageAnswer]) -> list[str]:
    """What a user of the ready-made stacks would see, a sentence per stack and host."""
    old = {answer.place: answer for answer in before}
    out = []
    for new in after:
        was = old.get(new.place)
        if was is None:
            out.append(f"{new.place}: new")
        elif new.pins is None and was.pins is not None:
            out.append(f"{new.place}: no longer resolves: {new.text}")
        elif new.pins is not None and was.pins is None:
            out.append(f"{new.place}: resolves now")
        elif new.pins is not None and was.pins is not None:
            moves = _moves(was, new)
            if moves:
                out.append(f"{new.place}: {', '.join(moves)}")
    return out


def _moves(was: ImageAnswer, new: ImageAnswer) -> list[str]:
    a: dict[str, Any] = {"python": was.python, "variant": was.variant, **(was.pins or {})}
    b: dict[str, Any] = {"python": new.python, "variant": new.variant, **(new.pins or {})}
    moves = []
    for name in [*a, *(name for name in b if name not in a)]:
        if a.get(name) != b.get(name):
            moves.append(f"{name} {a.get(name) or 'absent'} -> {b.get(name) or 'gone'}")
    return moves
