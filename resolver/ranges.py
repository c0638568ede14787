"""Masks in words: the shortest range that a person would write for a set of known versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envforge.resolver.versions import Domain


def describe(domain: Domain, mask: int) -> str:
    """See `Domain.describe`."""
    return ", ".join(domain.value(p) or "" for p in domain.positions(mask))
