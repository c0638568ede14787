"""What an incompatibility came from: the unit in which conflicts are explained.

A fact is one request line, one host fact, one rule, or everything one package says about another (a "merged range
row"). `key` groups the rows that belong to one fact; `kind` picks its sentence.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from envforge.resolver.solve import Row

Kind = Literal[
    "request",
    "driver",
    "gpu",
    "glibc",
    "option",
    "dependency",
    "inherited",
    "requires-python",
    "wheels",
    "archive",
    "builds",
    "code",
    "floor",
    "generation",
    "native",
    "rule",
    "unavailable",
    "learned",
    "forced",
    "exists",
]


@dataclass(frozen=True, slots=True)
class Fact:
    """kind and key as above; `a` and `b` the packages or labels it is about; `text` a ready sentence where the row has
    one; `source` where it is known from; `data` whatever the sentence needs (hashable)."""

    kind: Kind
    key: Hashable
    a: str = ""
    b: str = ""
    text: str = ""
    source: str = ""
    data: Any = field(default=None, compare=False)


def fact_of(row: Row) -> Fact:
    """What a row came from; every row that the resolver makes has a fact."""
    return cast(Fact, row.origin)
