"""Takes out of an environment what is never used at run time, while an image is built. Run by the environment's Python.

    slim.py ENV keep-headers|no-headers [PART/requirements.txt]

With a requirements file only the packages in it are looked at: a layer never reaches into the one below it. Gone are
test folders that no other module of the environment imports, torch's own test programs and its protobuf compiler,
static archives, bytecode, uv's own notes, and, where nothing compiles, C headers. Licences stay, and RECORD lists what
is left.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import re
import sys
from pathlib import Path

TESTS = {"test", "tests"}
# Started by nothing at run time: torch's C++ test programs, and its protobuf compiler (twice).
PROGRAMS = re.compile(r"^torch/bin/(test_|protoc|[A-Za-z]+Test$)")
WORD = re.compile(rb"tests?\b")
LIKELY = re.compile(rb"\s*(?:from|import)\s|.*import_module\(|\s*tests?\s*[,)]?\s*$")
LICENCE = re.compile(r"licen[cs]e|copying|notice|authors|copyright", re.IGNORECASE)
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]*\(?([^#)]*)|import[ \t]+([\w., \t]+))"
    r"|import_module\([ \t]*[\"']([.\w]+)",
    re.MULTILINE,
)


def main(env: str, headers: str, *parts: str) -> None:
    """The whole work; prints how much it took away."""
    site = next((Path(env) / "lib").glob("python3.*")) / "site-packages"
    names = {norm(name) for part in parts for name in locked(Path(part))}
    chosen = [d for d in importlib.metadata.distributions(path=[str(site)]) if not names or norm(d.name) in names]
    files = {d: list(d.files or ()) for d in chosen}
    wanted = imported_tests(site)
    gone = 0
    for dist, rows in files.items():
        dropped = {str(row) for row in rows if drops(row.as_posix(), headers == "keep-headers", wanted)}
        for name in dropped:
            path = site / name
            if path.is_file() or path.is_symlink():
                gone += path.lstat().st_size
                path.unlink()
        if dropped:
            rewrite(Path(str(dist._path)) / "RECORD", dropped)  # type: ignore[attr-defined]
    for name, _, _ in os.walk(site, topdown=False):
        folder = Path(name)
        if folder.name == "__pycache__":
            gone += sum(forget(path) for path in folder.iterdir())
        if not any(folder.iterdir()):
            folder.rmdir()
    sys.stdout.write(f"{gone / 1e6:,.0f} MB taken out that nothing uses at run time\n")


def norm(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(path: Path) -> list[str]:
    """Names in a hashed requirements file."""
    return re.findall(r"^([A-Za-z0-9][\w.-]*)==", path.read_text(), re.MULTILINE) if path.is_file() else []


def drops(name: str, keep_headers: bool, wanted: set[str]) -> bool:
    """Whether a file of a wheel goes, by its path in site-packages."""
    parts = name.split("/")
    if name.endswith((".a", ".pyc")) or PROGRAMS.match(name):
        return not name.startswith("..")
    if name.endswith(".dist-info/uv_cache.json"):
        return True  # when the wheel's file on the building machine was written: another time each build
    if parts[0] == ".." or parts[0].endswith((".dist-info", ".data")) or LICENCE.search(parts[-1]):
        return False
    if "include" in parts[1:-1] and not name.endswith(".py"):
        return not keep_headers
    at = next((i for i, part in enumerate(parts[:-1]) if i and part in TESTS), None)
    return at is not None and not any(name_of(parts, i) in wanted for i in range(at + 1, len(parts) + 1))


def name_of(parts: list[str], end: int) -> str:
    return ".".join([*parts[: end - 1], re.sub(r"\.\w+$", "", parts[end - 1])])


def imported_tests(site: Path) -> set[str]:
    """Dotted names with a part `test` or `tests` that a module outside such folders imports, with their parents."""
    found: set[str] = set()
    for path in site.rglob("*.py"):
        inner = path.relative_to(site).parts
        if TESTS.intersection(inner[:-1]):
            continue
        data = path.read_bytes()
        if not any(LIKELY.match(line_at(data, word.start())) for word in WORD.finditer(data)):
            continue
        text = data.decode("utf-8", "replace")
        package = list(inner[:-1])
        for base, names, plain, called in IMPORT.findall(text):
            for dotted in spelled(base, names, plain or called, package):
                words = dotted.split(".")
                if TESTS.intersection(words[1:]):
                    found.update(".".join(words[:i]) for i in range(2, len(words) + 1))
    return {name for name in found if TESTS.intersection(name.split("."))}


def line_at(data: bytes, place: int) -> bytes:
    end = data.find(b"\n", place)
    return data[data.rfind(b"\n", 0, place) + 1 : end if end >= 0 else len(data)]


def spelled(base: str, names: str, plain: str, package: list[str]) -> list[str]:
    """The absolute names that one import statement means."""
    if plain:
        return [word.split(" as ")[0].strip() for word in plain.split(",")]
    dots = len(base) - len(base.lstrip("."))
    stem = [*package[: len(package) - dots + 1], base.lstrip(".")] if dots else [base]
    root = ".".join(part for part in stem if part)
    return [root, *(f"{root}.{name.split(' as ')[0].strip()}" for name in names.replace("\\", "").split(","))]


def rewrite(record: Path, dropped: set[str]) -> None:
    """RECORD without the lines of what went: uninstalling and checking work as before."""
    with record.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.reader(stream) if row and row[0] not in dropped]
    fresh = record.with_name("RECORD.new")
    with fresh.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows(rows)
    fresh.replace(record)


def forget(path: Path) -> int:
    size = path.lstat().st_size
    path.unlink()
    return size


if __name__ == "__main__":
    main(*sys.argv[1:])
