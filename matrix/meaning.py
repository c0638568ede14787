"""What a schema cannot say about the hand-written rows: names that must exist, versions that must parse, no row twice.

Only a cold load comes here (see `load`), so heavy imports are fine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envforge.matrix.gpus import collisions
from envforge.matrix.strictyaml import (
    MAX_BYTES,
    Lines,
    line_of,
    nearest,
    parse_strict,
    place_of,
    raise_faults,
    validate,
)

VIRTUAL = ("python", "variant", "cuda", "driver", "glibc", "sm")

# What makes a row the same row in a higher layer.
IDENTITY: dict[str, tuple[str, ...]] = {
    "toolkits": ("cuda", "release"),
    "families": ("major",),
    "branches": ("branch",),
    "forward": ("cuda",),
    "architectures": ("sm",),
    "gpus": ("name",),
    "torch": ("torch", "variant", "arch"),
    "packages": ("name",),
    "native": ("package", "versions", "cuda"),
    "rules": ("id",),
    "bases": ("ref",),
    "cuda_images": ("os", "cuda"),
    "systems": ("os",),
    "notes": ("id",),
    "remote_models": ("family",),
}


@dataclass
class Row:
    """One row with the place that messages about it name."""

    data: dict[str, Any]
    where: str
    lines: Lines
    path: tuple[str | int, ...]

    def fault(self, text: str, *fields: str) -> str:
        """ "file:line: section row N field X: text" """
        path = (*self.path, *fields)
        return f"{self.where}:{line_of(self.lines, path)}: {place_of(path)}: {text}"


@dataclass
class Placed:
    """All rows with their places, before they lose them: what `check` works on.

    rows: section -> rows, the layers merged. policy: the fields of all files. policy_row: the place of each field.
    faults: what is wrong already ("file:line: ...").
    """

    rows: dict[str, list[Row]]
    policy: dict[str, Any]
    policy_row: dict[str, Row]
    faults: list[str]


Parsed = tuple[Any, Lines, list[str]]  # data, lines, faults of one file


def parse_file(where: str, raw: bytes, schema: Mapping[str, Any]) -> Parsed:
    """One file as plain data, its lines, and every fault of YAML and schema in it."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return None, {}, [f"{where}:{raw[: error.start].count(10) + 1}: not UTF-8 text"]
    data, lines, found = parse_strict(text, where, max_bytes=MAX_BYTES, floats=True)
    if lines:
        found += validate(data, lines, schema, where)
    return data, lines, found


def place_rows(files: Sequence[tuple[str, int, Parsed]]) -> Placed:
    """Merge parsed files, lowest layer first, and check what their rows mean to each other.

    `source` of every row is expanded to [text, confidence], `layer` is added to it.
    """
    faults: list[str] = []
    merged: dict[str, dict[tuple[Any, ...], Row]] = {section: {} for section in IDENTITY}
    policy: dict[str, Any] = {}
    policy_row: dict[str, Row] = {}
    for where, layer, (data, lines, found) in files:
        faults += found
        if found or not isinstance(data, dict):
            continue
        for name, value in data.get("policy", {}).items():
            policy[name] = value
            policy_row[name] = Row({name: value}, where, lines, ("policy",))
        faults += _merge(data, where, layer, lines, merged)
    rows = {section: list(table.values()) for section, table in merged.items()}
    if not faults:
        faults += _meaning(rows)
        missing = [name for name in ("as_of", "pythons", "coherence_days", "stale_days") if name not in policy]
        if missing:
            faults.append(f"{files[0][0] if files else 'matrix'}:1: policy: {', '.join(missing)} missing in every file")
    return Placed(rows, policy, policy_row, faults)


def read_rows(files: Sequence[tuple[str, int, bytes]], schema: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Parse, check and merge all files.

    Args:
        files: (name for messages, layer number, bytes), lowest layer first.
        schema: of one file.

    Returns:
        Section -> rows. `source` is expanded to [text, confidence], `policy` is a list of one.

    Raises:
        DataError: every fault of every file.
    """
    placed = place_rows([(where, layer, parse_file(where, raw, schema)) for where, layer, raw in files])
    raise_faults(placed.faults)
    return {section: [row.data for row in table] for section, table in placed.rows.items()} | {
        "policy": [placed.policy]
    }


def _merge(
    data: dict[str, Any], where: str, layer: int, lines: Lines, merged: dict[str, dict[tuple[Any, ...], Row]]
) -> list[str]:
    """Expand the sources of one file's rows and lay them over what is there."""
    faults = []
    sources = data.get("sources", {})
    used = set()
    for section, key_fields in IDENTITY.items():
        for number, item in enumerate(data.get(section, ())):
            item = dict(item)  # the parsed file stays as it is: the checks read one file many times
            row = Row(item, where, lines, (section, number))
            source = item["source"]
            if isinstance(source, str):
                used.add(source)
                if source not in sources:
                    known = nearest(source, list(sources))
                    faults.append(row.fault(f'"{source}" is not in the sources of this file{known}', "source"))
                    continue
                source = sources[source]
            item["source"] = [source["text"], source["confidence"]]
            item["layer"] = layer
            key = tuple(item.get(name) for name in key_fields)
            before = merged[section].get(key)
            if before is not None and before.data["layer"] == layer:
                first = f"{before.where}:{line_of(before.lines, before.path)}"
                faults.append(row.fault(f"the same {' and '.join(key_fields)} as in {first}"))
            merged[section][key] = row
    for unused in sorted(set(sources) - used):
        faults.append(f"{where}:{line_of(lines, ('sources', unused))}: field sources.{unused}: no row uses it")
    return faults


def _meaning(rows: dict[str, list[Row]]) -> list[str]:
    packages = {row.data["name"] for row in rows["packages"]}
    faults = _ranks(rows["packages"])
    faults += _torch(rows["torch"])
    names = {*packages, *VIRTUAL}
    variants = {row.data["variant"] for row in rows["torch"]}
    spec = _specifier_checker(names, variants)
    for row in rows["rules"]:
        item = row.data
        faults += [fault for field in ("when", "needs", "requires") for fault in spec(row, field)]
        if not item.get("needs") and not item.get("requires"):
            faults.append(row.fault("needs nothing and requires nothing, so it can never refuse", "when"))
        if item["level"] == "hard" and item.get("warning"):
            faults.append(row.fault("only a rule of level warn has a warning", "warning"))
        for name in item.get("requires", {}):
            if name in VIRTUAL:
                faults.append(row.fault(f"{name} is not a package", "requires", name))
    for row in rows["remote_models"]:
        faults += spec(row, "needs")
    for row in rows["native"]:
        if row.data["package"] not in packages:
            known = nearest(row.data["package"], sorted(packages))
            faults.append(row.fault(f"{row.data['package']} is no package of the matrix{known}", "package"))
        problem = _bad_specifier(row.data["versions"])
        if problem:
            faults.append(row.fault(problem, "versions"))
        if row.data["match"] != "any" and not row.data.get("cuda"):
            faults.append(row.fault(f"match {row.data['match']} without any CUDA version", "cuda"))
    for row in rows["toolkits"]:
        driver = row.data["driver"]
        if driver is not None and not driver.startswith(f"{row.data['branch']}."):
            faults.append(row.fault(f"{driver} is not of branch {row.data['branch']}", "driver"))
    systems = {row.data["os"] for row in rows["systems"]}
    for row in rows["cuda_images"]:
        if row.data["os"] not in systems:
            faults.append(row.fault(f"{row.data['os']} has no row in systems", "os"))
    known_gpus = [(row.data["name"], row.data.get("aliases", [])) for row in rows["gpus"]]
    for number, name, owner in collisions(known_gpus):
        faults.append(rows["gpus"][number].fault(f'"{name}" cannot be told from {owner}', "name"))
    return faults


def _ranks(packages: list[Row]) -> list[str]:
    owner: dict[int, str] = {}
    faults = []
    for row in packages:
        first = owner.setdefault(row.data["rank"], row.data["name"])
        if first != row.data["name"]:
            faults.append(row.fault(f"{row.data['rank']} is the rank of {first} already", "rank"))
    return faults


def _torch(rows: list[Row]) -> list[str]:
    faults = []
    defaults: dict[tuple[str, str], str] = {}
    for row in rows:
        item = row.data
        variant, cuda = item["variant"], item.get("cuda")
        if variant == "cpu":
            faults += [row.fault("a cpu build has none", name) for name in ("cuda", "sm", "ptx") if item.get(name)]
        elif cuda is None or variant != "cu" + cuda.replace(".", ""):
            faults.append(row.fault(f"{cuda} does not belong to {variant}", "cuda"))
        elif not item["sm"]:
            faults.append(row.fault("a CUDA build has GPU code", "sm"))
        if item.get("default"):
            first = defaults.setdefault((item["torch"], item["arch"]), variant)
            if first != variant:
                faults.append(row.fault(f"{first} is the default of torch {item['torch']} already", "default"))
    return faults


def _specifier_checker(names: set[str], variants: set[str]) -> Callable[[Row, str], list[str]]:
    def check(row: Row, field: str) -> list[str]:
        faults = []
        for name, value in row.data.get(field, {}).items():
            if name not in names:
                known = nearest(name, sorted(names))
                faults.append(row.fault(f"{name} is no package of the matrix and no virtual name{known}", field, name))
            elif name == "variant":
                for variant in value.split(","):
                    if variant.strip() not in variants:
                        known = nearest(variant.strip(), sorted(variants))
                        faults.append(
                            row.fault(f"no torch build has the variant {variant.strip()}{known}", field, name)
                        )
            else:
                problem = _bad_specifier(value)
                if problem:
                    faults.append(row.fault(problem, field, name))
        return faults

    return check


def _bad_specifier(text: str) -> str:
    """What is wrong with a version specifier, or an empty string."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        parsed = SpecifierSet(text)
    except InvalidSpecifier:
        return f'"{text}" is not a version specifier such as ">=2.4,<3"'
    if any(one.operator == "===" for one in parsed):
        return f'"{text}": === compares text, not versions; write =='
    return "" if len(parsed) else f'"{text}" limits nothing'
