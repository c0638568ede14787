"""The search's problems as resolvelib sees them: the same constraints, sets as the same bitmasks.

resolvelib knows packages and the requirements of one version. What has no such form goes through helper packages:

- "A in S breaks B in M": A in S requires clash==1, B in M requires clash==2; nobody has to have either.
- "A in S needs B in T where P is in Q": A in S requires a helper whose candidates are the ways to meet the row: one
  requires P outside Q, the other B in T.

Helpers are decided last. Rows that forbid an absence of something that they do not activate have no form and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from envforge.resolver.solve import Problem
from envforge.resolver.versions import ABSENT

Requirement = tuple[str, int]  # (name, allowed positions)
Candidate = tuple[str, int]  # (name, position)
VIRTUAL = ("python", "torch-variant", "host:")


class Provider:
    """resolvelib's provider for one problem."""

    def __init__(self, problem: Problem) -> None:
        assert isinstance(problem.rank, Mapping)
        self.rank: dict[str, int] = dict(problem.rank)
        self.full = {name: domain.full for name, domain in problem.domains.items()}
        self.order: Mapping[str, Sequence[int]] = problem.prefer if isinstance(problem.prefer, Mapping) else {}
        self.root: list[Requirement] = []
        self.barred: dict[str, int] = {}
        self.needs: dict[str, list[tuple[int, Requirement]]] = {name: [] for name in problem.domains}
        for row in sorted(problem.rows, key=lambda row: (row.terms, str(row.activates))):
            terms: dict[str, int] = {}
            for name, mask in row.terms:
                terms[name] = mask & terms.get(name, self.full[name])
            if 0 not in terms.values():
                self._add(terms, row.activates)

    def _add(self, terms: dict[str, int], activates: str | None) -> None:
        end = (activates, self.full[activates] & ~terms[activates]) if activates is not None else None
        conditions = sorted((t for t in terms.items() if t[0] != activates), key=lambda t: self.rank[t[0]])
        if any(mask & ABSENT for _, mask in conditions):
            raise ValueError("resolvelib has no form for this row")
        if not conditions:
            assert end is not None
            self.root.append(end)
            return
        (first, mask), others = conditions[0], conditions[1:]
        if not others and end is None:
            self.barred[first] = self.barred.get(first, 0) | mask
        elif not others and end is not None:
            self.needs[first].append((mask, end))
        elif end is None and len(others) == 1:
            self._apart((first, mask), others[0])
        else:
            ways = len(others) + (end is not None)
            helper = self._helper(ways)
            self.needs[first].append((mask, (helper, (2 << ways) - 2)))
            for position, (other, bad) in enumerate(others, 1):
                if other.startswith(VIRTUAL):
                    self.needs[helper].append((1 << position, (other, self.full[other] & ~bad & ~ABSENT)))
                else:
                    self._apart((helper, 1 << position), (other, bad))
            if end is not None:
                self.needs[helper].append((1 << ways, end))

    def _apart(self, one: Requirement, two: Requirement) -> None:
        clash = self._helper(2)
        self.needs[one[0]].append((one[1], (clash, 0b010)))
        self.needs[two[0]].append((two[1], (clash, 0b100)))

    def _helper(self, values: int) -> str:
        name = f"helper-{len(self.full)}"
        self.full[name] = (2 << values) - 1
        self.needs[name] = []
        self.rank[name] = 1_000_000 + len(self.full)
        return name

    def identify(self, requirement_or_candidate: tuple[str, int]) -> str:
        return requirement_or_candidate[0]

    def get_preference(self, identifier: str, *_: object, **__: object) -> int:
        return self.rank[identifier]

    def narrow_requirement_selection(self, identifiers: Iterable[str], *_: object, **__: object) -> Iterable[str]:
        return identifiers

    def find_matches(
        self,
        identifier: str,
        requirements: Mapping[str, Iterator[Requirement]],
        incompatibilities: Mapping[str, Iterator[Candidate]],
    ) -> Callable[[], Iterator[Candidate]]:
        allowed = self.full[identifier] & ~ABSENT & ~self.barred.get(identifier, 0)
        for _, mask in requirements[identifier]:
            allowed &= mask
        for _, position in incompatibilities[identifier]:
            allowed &= ~(1 << position)

        def in_order() -> Iterator[Candidate]:
            left = allowed
            for position in self.order.get(identifier, ()):
                if left >> position & 1:
                    left ^= 1 << position
                    yield identifier, position
            while left:
                position = left.bit_length() - 1
                left ^= 1 << position
                yield identifier, position

        return in_order

    def is_satisfied_by(self, requirement: Requirement, candidate: Candidate) -> bool:
        return bool(requirement[1] >> candidate[1] & 1)

    def get_dependencies(self, candidate: Candidate) -> list[Requirement]:
        name, position = candidate
        return [requirement for mask, requirement in self.needs[name] if mask >> position & 1]


def resolvelib_answer(problem: Problem, rounds: int) -> dict[str, int] | str | None:
    """Position per name, helpers left out; None for a conflict; "gave up" after so many rounds, "crashed" where a cycle
    sends resolvelib into endless recursion."""
    import resolvelib

    provider = Provider(problem)
    resolver: resolvelib.Resolver[Requirement, Candidate, str] = resolvelib.Resolver(
        provider, resolvelib.BaseReporter()
    )  # type: ignore[arg-type]
    try:
        result = resolver.resolve(provider.root, max_rounds=rounds)
    except resolvelib.ResolutionTooDeep:
        return "gave up"
    except RecursionError:
        return "crashed"
    except resolvelib.ResolutionImpossible:
        return None
    return {name: candidate[1] for name, candidate in result.mapping.items() if name in problem.domains}
