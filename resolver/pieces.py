"""The rows of one package, as a value that can be written down and read back.

What they are made of (release files, roles in the matrix, this code) is the business of whoever keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from envforge.resolver.facts import Fact
from envforge.resolver.solve import Row

Key: TypeAlias = tuple[object, ...]


class Store(Protocol):
    """Where the pieces of earlier runs lie. It must know them by everything that they were made of; both ways it may
    fail in silence, for a piece can always be made again."""

    def read(self, at: Key) -> str | None:
        """What was written under this key."""

    def write(self, at: Key, text: str) -> None:
        """Keep it for the next run."""


@dataclass
class Piece:
    """The rows of one package or one of its extras, and what they reach."""

    rows: list[Row] = field(default_factory=list)
    touched: dict[str, None] = field(default_factory=dict)  # packages that it names
    extras: dict[str, str] = field(default_factory=dict)  # extra variable -> package
    reached: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    floors: dict[tuple[str, int], int] = field(default_factory=dict)  # (glibc, pythons) -> versions

    def add(self, fact: Fact, *terms: tuple[str, int], activates: str | None = None) -> None:
        """Forbid a combination; a term with an empty mask can never hold, so the row says nothing."""
        if all(mask for _, mask in terms):
            self.rows.append(Row(tuple(terms), fact, activates))

    def dumps(self) -> str:
        """As JSON; each fact once, however many rows it has."""
        facts: dict[tuple[Fact, object], int] = {}
        rows: list[list[Any]] = []
        for row in self.rows:
            fact = row.origin
            assert isinstance(fact, Fact)
            at = facts.setdefault((fact, fact.data), len(facts))
            rows.append([at, row.activates, *(part for term in row.terms for part in term)])
        data = {
            "facts": [[f.kind, f.key, f.a, f.b, f.text, f.source, f.data] for f, _ in facts],
            "rows": rows,
            "touched": list(self.touched),
            "extras": self.extras,
            "reached": self.reached,
            "floors": [[*floor, versions] for floor, versions in self.floors.items()],
        }
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def read_piece(text: str) -> Piece:
    """The inverse of `Piece.dumps`.

    Raises:
        ValueError, KeyError, TypeError, IndexError: not such a text.
    """
    data = json.loads(text)
    facts = [
        Fact(kind, _tuple(key), a, b, words, source, _tuple(more))
        for kind, key, a, b, words, source, more in data["facts"]
    ]
    rows = [
        Row(tuple(zip(row[2::2], row[3::2], strict=True)), facts[row[0]], row[1])
        for row in data["rows"]
    ]  # fmt: skip
    return Piece(
        rows,
        dict.fromkeys(data["touched"]),
        data["extras"],
        [(name, tuple(extras)) for name, extras in data["reached"]],
        {(glibc, pythons): versions for glibc, pythons, versions in data["floors"]},
    )


def _tuple(value: Iterable[Any] | Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
