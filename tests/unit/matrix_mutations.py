"""Breaks the shipped matrix one value at a time, to see whether anything notices (test_matrix_check_mutations)."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from envforge.matrix.check import Finding, check_matrix
from envforge.matrix.load import DATA, SCHEMA, File, collect
from envforge.matrix.meaning import Parsed, parse_file
from envforge.matrix.strictyaml import YamlPath, place_of, validate

FREE_TEXT = {"text", "summary", "about"}  # prose: no code and no check depends on its words
LABELS = {("notes", "id")}  # a label that nothing refers to
SWAPS = {">=": [">", "<"], "<": ["<=", ">="], "<=": ["<"], ">": [">="], "==": ["!="]}


@dataclass(frozen=True)
class Mutation:
    """One value of one file, replaced."""

    where: str
    path: YamlPath
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.where}: {place_of(self.path)}: {self.old!r} -> {self.new!r}"

    @property
    def free_text(self) -> bool:
        """The value is prose or a label."""
        return self.path[-1] in FREE_TEXT or (self.path[0], self.path[-1]) in LABELS


class Matrix:
    """The shipped files, parsed once."""

    def __init__(self) -> None:
        self.schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
        files = collect(DATA, ())
        self.files: list[tuple[File, Parsed]] = [(f, parse_file(f.where, f.raw, self.schema)) for f in files]
        self.leaves = [(file.where, path, value) for file, (data, _, _) in self.files for path, value in leaves(data)]
        self.siblings: dict[tuple[Any, ...], list[Any]] = {}
        for _, path, value in self.leaves:
            self.siblings.setdefault(kind(path), []).append(value)

    def mutations(self, count: int, seed: int) -> list[Mutation]:
        """A sample of `count` values, each broken in one way."""
        rng = random.Random(seed)
        found: list[Mutation] = []
        while len(found) < count:
            where, path, value = rng.choice(self.leaves)
            ways = [new for new in self.ways(path, value) if new != value]
            if ways:
                found.append(Mutation(where, path, value, rng.choice(ways)))
        return found

    def ways(self, path: YamlPath, value: Any) -> list[Any]:
        """What a slip could make of a value; the kinds of slips are equally likely."""
        rng = random.Random(f"{path} {value}")
        if isinstance(value, bool):
            return [not value]
        if isinstance(value, int):
            return [value + 1, value - 1, value + 10]
        if not isinstance(value, str):
            return []
        found: list[Any] = []
        others = [other for other in self.siblings[kind(path)] if other != value]
        if others:
            found.append(rng.choice(others))
        numbers = list(re.finditer(r"\d+", value))
        if numbers:
            at = rng.choice(numbers)
            for step in (1, -1):
                bumped = str(max(0, int(at[0]) + step)).zfill(len(at[0]) if at[0].startswith("0") else 0)
                found.append(value[: at.start()] + bumped + value[at.end() :])
        operators = list(re.finditer(r">=|<=|==|<|>", value))
        if operators and not self._prose(path):
            at = rng.choice(operators)
            found.append(value[: at.start()] + rng.choice(SWAPS[at[0]]) + value[at.end() :])
        words = value.split()
        if len(words) > 1:
            gone = rng.randrange(len(words))
            found.append(" ".join(words[:gone] + words[gone + 1 :]))
        clauses = value.split(",")
        if len(clauses) > 1:
            found.append(",".join(clauses[:-1]))
        if not numbers and len(value) > 2:
            at_char = rng.randrange(len(value) - 1)
            found.append(value[:at_char] + value[at_char + 1] + value[at_char] + value[at_char + 2 :])
        return found

    @staticmethod
    def _prose(path: YamlPath) -> bool:
        return path[-1] in FREE_TEXT

    def broken(self, mutation: Mutation) -> list[tuple[File, Parsed]]:
        """The files with one value replaced, held against the schema again."""
        out = []
        for file, parsed in self.files:
            if file.where == mutation.where:
                data, lines, _ = parsed
                data = copy.deepcopy(data)
                place = data
                for step in mutation.path[:-1]:
                    place = place[step]
                place[mutation.path[-1]] = mutation.new
                parsed = (data, lines, validate(data, lines, self.schema, file.where))
            out.append((file, parsed))
        return out

    def findings(self, mutation: Mutation) -> list[Finding]:
        """What load and check say about the broken matrix."""
        return check_matrix(files=self.broken(mutation))


def leaves(data: Any, path: YamlPath = ()) -> Iterator[tuple[YamlPath, Any]]:
    """Every scalar of a document with its path."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, (*path, key))
    elif isinstance(data, list):
        for position, value in enumerate(data):
            yield from leaves(value, (*path, position))
    elif data is not None:
        yield path, data


def kind(path: YamlPath) -> tuple[Any, ...]:
    """Paths of one kind hold values of one kind: ("gpus", "sm"), ("rules", "when", "torch")."""
    steps = tuple(step for step in path if isinstance(step, str))
    return ("sources", steps[-1]) if steps[0] == "sources" else steps
