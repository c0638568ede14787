"""What is known of an answer beside the rows: its evidence, and notes about releases beyond the matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envforge.errors import UsageError

if TYPE_CHECKING:
    from envforge.matrix.evidence import Cell, Receipt
    from envforge.matrix.model import Matrix
    from envforge.matrix.releases import Release
    from envforge.resolver.plan import Plan
    from envforge.resolver.resolve import Answer, Wish
    from envforge.settings import Settings

PREFERENCES = ("verified",)
TRIED = 8  # receipts that --prefer verified tries


@dataclass(frozen=True)
class Evidence:
    """The receipts of this machine's layers."""

    receipts: tuple[Receipt, ...]

    def cells(self, matrix: Matrix, plan: Plan | None) -> tuple[Cell, ...]:
        """What is known of each cell of a plan."""
        from envforge.matrix.evidence import cells

        if plan is None:
            return ()
        roles = {name: row.role for name, row in matrix.packages.items()}
        warned = {}
        told = {warning.id for warning in plan.warnings}
        for rule in matrix.rules:
            if rule.source.confidence != "verified-by-execution":
                continue  # only what was seen to fail is known bad; the rest is a warning and no more
            if rule.level == "warn" and rule.warning in told and rule.text in {w.text for w in plan.warnings}:
                warned.update({name: rule.source.text for name in rule.when if name in plan.pins})
        return cells(plan.pins, plan.variant, roles, self.receipts, warned)

    def prefer(self, what: str, matrix: Matrix, wish: Wish, load: Callable[[str], tuple[Release, ...]]) -> Wish:
        """The wish, with the versions of a proven set tried first where one meets the request on these hosts.

        Raises:
            UsageError: an unknown preference.
        """
        from envforge.matrix.evidence import preferred
        from envforge.resolver.resolve import resolve

        if what not in PREFERENCES:
            raise UsageError(f"unknown preference {what[:40]!r}", f"known: {', '.join(PREFERENCES)}")
        named = [request.name for request in wish.requests]
        for receipt in preferred(self.receipts, [name for name in named if name in matrix.packages])[:TRIED]:
            first = {**receipt.versions, "python": receipt.python, "torch-variant": receipt.variant}
            tried = replace(wish, options=replace(wish.options, keep=tuple(sorted(first.items()))))
            plan = resolve(matrix, tried, load).plan
            if plan is not None and any(cell.state == "verified" for cell in self.cells(matrix, plan)):
                return tried
        return wish


def evidence_for(settings: Settings) -> Evidence:
    """The evidence beside the matrix and its layers; a damaged file counts as not there (`matrix check` names it)."""
    from envforge.keep.receipts import receipt_folders
    from envforge.matrix.evidence import load_receipts

    return Evidence(load_receipts(receipt_folders(settings.layers))[0])


def with_notes(answer: Answer, notes: tuple[str, ...]) -> Answer:
    """The answer, its plan warning of releases that are newer than the matrix."""
    from envforge.resolver.plan import Warning_

    if not notes or answer.plan is None:
        return answer
    warnings = (*answer.plan.warnings, *(Warning_("newer-than-matrix", note) for note in notes))
    return replace(answer, plan=replace(answer.plan, warnings=warnings))
