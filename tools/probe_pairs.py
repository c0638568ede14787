#!/usr/bin/env python3
"""Installs pairs of releases into fresh CPU environments and lets an import or a training step decide.

    tools/probe_pairs.py                       every line below that matrix/evidence/probes.yaml does not hold yet
    tools/probe_pairs.py --only deepspeed      lines that hold this word
    tools/probe_pairs.py --again --only trl    do them anew
    tools/probe_pairs.py --line 'import datasets | datasets==2.14.4 numpy==2.0.2'      one more, recorded too
    tools/probe_pairs.py --judge               run nothing: hold what is recorded against the rules

A line is `STEP [IMPORT...] | REQUIREMENT... [@DATE]`. STEP: import, lora, trainer or sft (see tiny_check.py).
Requirements with == are the pair: they override what other packages' metadata says of them, so that the run decides and
not the metadata. The others only have to be there. @DATE cuts the rest off at a date (torch and its own needs exempt).
torch 2.13.0 for the CPU is always there, unless the line starts with `notorch`.

A record: `metadata` is what the installed packages' own metadata has against the pair (then no rule is needed),
`with` what else of the matrix was installed. Each record is written as soon as it is there, sorted; a run that was
stopped goes on where it was.
Exit codes: 0; 1 when a record contradicts the rules (a hard rule refuses what works, or nothing refuses what fails);
2 usage.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fresh_env import TORCH, Environment, end_cleanly, fresh, here
from packaging.specifiers import SpecifierSet

from envforge.files import write_atomic

if TYPE_CHECKING:
    from envforge.matrix.model import Rule

EVIDENCE = Path(__file__).resolve().parents[1] / "matrix" / "evidence" / "probes.yaml"
LINES = Path(__file__).resolve().with_name("probe_pairs.txt")
STEPS = ("import", "lora", "trainer", "sft")
FROM_SOURCE = ("deepspeed",)  # their build imports torch, so they are built in the environment itself
UNDATED = ("torch", "filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec", "mpmath")
HEAD = """\
# Pairs of releases that were really installed and run by tools/probe_pairs.py, one a row, sorted. Written by it; to add
# one, give it to that tool. works: what the step did. metadata: what the installed packages' own metadata has against
# the pair. with: what else of the matrix was there. rule: the hard rules that refuse the row are found by
# `tools/probe_pairs.py --judge`, and by a test; `unruled` says why a failing row needs none.
"""


@dataclass(frozen=True)
class Probe:
    """One question. pins: name -> version. also: further requirements. date: cut-off for the rest."""

    step: str
    imports: tuple[str, ...]
    pins: tuple[tuple[str, str], ...]
    also: tuple[str, ...] = ()
    date: str = ""
    torch: bool = True

    @property
    def key(self) -> str:
        """What tells one probe from another, and sorts them."""
        pins = " ".join(f"{name}=={version}" for name, version in self.pins)
        rest = " ".join(("", *self.also, *((f"@{self.date}",) if self.date else ())))
        return f"{pins}{rest} | {' '.join((self.step, *self.imports))}"


def parse(line: str) -> Probe:
    """A line -> the probe.

    Raises:
        ValueError: not such a line, with what is wrong.
    """
    left, bar, right = line.partition("|")
    words = left.split()
    torch = not (words and words[0] == "notorch")
    words = words if torch else words[1:]
    if not bar or not words or words[0] not in STEPS:
        raise ValueError(f"{line!r} is not STEP [IMPORT...] | REQUIREMENT...; STEP is one of {', '.join(STEPS)}")
    pins, also, date = {}, [], ""
    for word in right.split():
        name, equal, version = word.partition("==")
        if word.startswith("@"):
            date = datetime.strptime(word[1:], "%Y-%m-%d").strftime("%Y-%m-%d")
        elif equal and re.fullmatch(r"[a-z0-9-]+", name) and re.fullmatch(r"[0-9][\w.]*", version):
            if name in pins:
                raise ValueError(f"{line!r} pins {name} twice")
            pins[name] = version
        elif equal:
            raise ValueError(f"{word!r} is not name==version")
        else:
            also.append(word)
    if not pins:
        raise ValueError(f"{line!r} pins nothing")
    return Probe(words[0], tuple(words[1:]), tuple(sorted(pins.items())), tuple(sorted(also)), date, torch)


def run(probe: Probe) -> dict[str, Any] | str:
    """Installs and checks; -> the record, or why nothing could be installed (which says nothing about the pair)."""
    record: dict[str, Any] = {"probe": probe.key, "pins": dict(probe.pins)}
    with fresh() as env:
        trouble = install(env, probe)
        if trouble:
            return trouble
        checked = env.check(probe.step, probe.imports)
        complaints = env.complaints()
    known = set(matrix_names()) | {"pyarrow", "pandas", "protobuf", "setuptools"}
    record["works"] = checked.ok
    if checked.error:
        record["error"] = checked.error
    about = [text for text in complaints if any(re.search(rf"(^|\s){re.escape(n)}\b", text) for n, _ in probe.pins)]
    if about:
        record["metadata"] = about
    others = {n: v for n, v in checked.versions.items() if n in known and n not in dict(probe.pins)}
    record |= {"with": others} if others else {}
    record["environment"] = here()
    record["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return record


def install(env: Environment, probe: Probe) -> str:
    """-> what went wrong, "" when everything is installed."""
    overrides = env.folder / "overrides.txt"
    overrides.write_text("".join(f"{name}=={version}\n" for name, version in probe.pins), encoding="utf-8")
    later = [pin for pin in probe.pins if pin[0] in FROM_SOURCE]
    first = [f"{name}=={version}" for name, version in probe.pins if (name, version) not in later]
    arguments = ["--overrides", str(overrides), *([TORCH] if probe.torch else []), *first, *probe.also]
    dated: list[str] = []
    if probe.date:
        dated = ["--exclude-newer", f"{probe.date}T23:59:59Z"]
        for name in dict.fromkeys((*UNDATED, *dict(probe.pins))):
            dated += ["--exclude-newer-package", f"{name}=false"]
    if later:
        arguments += ["setuptools<81", "wheel", "py-cpuinfo", "psutil", "ninja", "numpy", "pydantic"]
    # Never a source archive of anything but the pair: a resolver's way out must not become an hour of compiling.
    allowed = [f"--no-binary={name}" for name, _ in later]
    ran = env.install([*arguments, *dated, "--only-binary", ":all:"])
    if ran.ok and later:
        wanted = [f"{name}=={version}" for name, version in later]
        more = ["--overrides", str(overrides), "--no-build-isolation", "--only-binary", ":all:", *allowed]
        ran = env.install([*wanted, *more, *dated])
    return "" if ran.ok else " ".join(ran.words.split())[:400]


def matrix_names() -> tuple[str, ...]:
    """Packages that the matrix has releases of."""
    from envforge.matrix.releases import known_packages

    return known_packages()


# --- records ----------------------------------------------------------------------------------------------------------


def read(path: Path = EVIDENCE) -> list[dict[str, Any]]:
    """The records of a file; none where there is no file.

    Raises:
        DataError: malformed.
    """
    import json

    from envforge.matrix.strictyaml import load_checked, read_text

    if not path.exists():
        return []
    schema = json.loads((path.parents[1] / "schema" / "probes.json").read_text(encoding="utf-8"))
    data, _ = load_checked(read_text(path), path.name, schema)
    return list(data["probes"])


def text_of(records: Sequence[Mapping[str, Any]]) -> str:
    """The file: one flow mapping a row, so that a change shows as a line."""
    import json

    def flow(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(flow, value)) + "]"
        return json.dumps(value, ensure_ascii=False)

    rows = sorted(records, key=lambda record: str(record["probe"]))
    return HEAD + "probes:\n" + "".join(f"- {flow(dict(row))}\n" for row in rows)


def add(record: Mapping[str, Any], path: Path = EVIDENCE) -> None:
    """Adds or replaces one record; the file is read again first, so that nothing written meanwhile is lost."""
    kept = {row["probe"]: row for row in read(path)}
    old = kept.get(record["probe"], {})
    kept[record["probe"]] = {**record, **({"unruled": old["unruled"]} if "unruled" in old else {})}
    write_atomic(path, text_of(list(kept.values())))


# --- against the rules ------------------------------------------------------------------------------------------------


def refusing(record: Mapping[str, Any], rules: Sequence[Rule]) -> list[str]:
    """The hard rules that refuse what a record had installed (no GPU, so no rule on drivers, GPUs or variants)."""
    have = {**record.get("with", {}), **record["pins"], "python": "3.11"}
    return [rule.id for rule in rules if rule.level == "hard" and _refuses(rule, have)]


def _refuses(rule: Rule, have: Mapping[str, str]) -> bool:
    def inside(name: str, specifier: str) -> bool:
        return SpecifierSet("" if specifier == "*" else specifier).contains(have[name], prereleases=True)

    if not all(name in have and inside(name, specifier) for name, specifier in rule.when.items()):
        return False
    broken = any(name in have and not inside(name, specifier) for name, specifier in rule.needs.items())
    return broken or any(name not in have or not inside(name, spec) for name, spec in rule.requires.items())


def contradictions(records: Sequence[Mapping[str, Any]], rules: Sequence[Rule]) -> list[str]:
    """Sentences about records that the rules do not match."""
    out = []
    for record in records:
        named = refusing(record, rules)
        if " | import " in record["probe"] and record["works"]:
            # An import that works says nothing about what other packages do in a step.
            about = {rule.id for rule in rules if {*rule.when, *rule.needs, *rule.requires} <= set(record["pins"])}
            named = [name for name in named if name in about]
        if record["works"] and named:
            out.append(f"{record['probe']}: works, but {', '.join(named)} refuses it")
        if record["works"] or named or record.get("metadata") or record.get("unruled"):
            continue
        out.append(f"{record['probe']}: fails ({record['error']}), and nothing refuses it")
    return out


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="lines that hold this text")
    parser.add_argument("--again", action="store_true", help="also what is recorded")
    parser.add_argument("--line", action="append", help="a probe of your own, recorded too")
    parser.add_argument("--limit", type=int, default=10**6, help="at most so many")
    parser.add_argument("--judge", action="store_true", help="run nothing")
    options = parser.parse_args(argv)
    lines = options.line or [
        line for line in LINES.read_text(encoding="utf-8").splitlines() if line.strip() and not line.startswith("#")
    ]
    try:
        probes = [parse(line) for line in lines if options.only in line]
    except ValueError as error:
        parser.error(str(error))
    done = {record["probe"] for record in read()}
    wanted = [probe for probe in probes if options.again or options.line or probe.key not in done]
    if not options.judge:
        end_cleanly()
        for probe in wanted[: options.limit]:
            record = run(probe)
            if isinstance(record, str):
                print(f"{probe.key}\n    not run: {record}", flush=True)
                continue
            add(record)
            verdict = "works" if record["works"] else f"fails: {record['error']}"
            print(f"{probe.key}\n    {verdict}", flush=True)
            for text in record.get("metadata", ()):
                print(f"    metadata: {text}", flush=True)
    from envforge.matrix.load import load_matrix

    wrong = contradictions(read(), load_matrix().rules)
    for text in wrong:
        print(f"contradiction: {text}")
    print(f"{len(read())} pairs recorded, {len(wrong)} contradict the rules")
    return int(bool(wrong))


__all__ = ["Probe", "add", "contradictions", "main", "parse", "read", "refusing", "text_of"]

if __name__ == "__main__":
    sys.exit(main())
