"""Which releases of a project page, and which of their requirement lines, go into the matrix."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from envforge.errors import IndexUnreachableError
from envforge.matrix.releases import Release, RequiresFrom

# In the order in which they are worth having: the stacks first.
PACKAGES = (
    *("torch", "transformers", "peft", "accelerate", "unsloth", "unsloth-zoo", "xtuner", "bitsandbytes", "numpy"),
    *("triton", "torchvision", "torchaudio", "trl", "datasets", "tokenizers", "huggingface-hub", "mmengine"),
    *("deepspeed", "safetensors", "sentencepiece", "scipy", "pyarrow", "setuptools", "mmengine-lite", "xformers"),
    *("flash-attn", "liger-kernel", "torchao", "vllm", "lmdeploy", "axolotl", "llamafactory", "ms-swift", "einops"),
    *("protobuf", "pydantic", "fsspec", "pandas", "tiktoken", "kernels", "hf-transfer", "hf-xet", "rich"),
)

# Releases uploaded since this day, and the last final one before it (what was current then), are kept...
SINCE = "2022-11-01"
# ...and from this version on whatever their age: the first of the era that people still pin.
FLOORS = {
    "torch": "1.13.0",
    "torchvision": "0.14.0",
    "torchaudio": "0.13.0",
    "bitsandbytes": "0.35.0",
    "protobuf": "3.20.0",
    "numpy": "1.21.0",
    "tokenizers": "0.13.0",
}

RULES = 1  # raise it when the two choices below change, so that known releases are read anew

# Requirements behind these extras are left out: nobody resolves them for a training environment.
DROPPED_EXTRAS = re.compile(
    r"(dev(el|elop|elopment)?|tests?|testing|docs?|documentation|readthedocs|quality|lint|style|typ(e|es|ing)|mypy|"
    r"check|cover|coverage|enabler|benchmarks?|release|ci)([-_.].*)?|.*[-_.](dev|tests?|docs?)"
)
DROPPED_EXTRAS_OF = {"transformers": {"all"}, "deepspeed": {"all"}}
# CUDA's libraries come with torch's variant, which matrix/data/torch.yaml describes.
DROPPED_NAMES_OF = {"torch": re.compile(r"(nvidia|cuda)-.*")}


@dataclass(frozen=True, slots=True)
class Pick:
    """One release and the file whose metadata speaks for it (`wheel`: that file is a wheel)."""

    version: str
    uploaded: str
    python: str
    wheels: tuple[str, ...]
    sdist: bool
    yanked: bool
    size: int
    wheel: bool
    file: Any  # pypi_simple.DistributionPackage

    def release(self, requires: tuple[str, ...], origin: RequiresFrom) -> Release:
        """The row, once its requirements are known."""
        values = (self.version, self.uploaded, self.python, requires, self.wheels, self.sdist, self.yanked, self.size)
        return Release(*values, requires_from=origin)


def pick(name: str, files: Iterable[Any], *, window: bool = True) -> list[Pick]:
    """The releases of a project page that count, ascending: in the window, installable on Linux, no `.devN`.

    `window=False` leaves the age out.
    A release is yanked when all its files are; where only some are, those do not count.

    Raises:
        IndexUnreachableError: the page has no upload times.
    """
    from packaging.version import InvalidVersion, Version

    by_version: dict[Any, list[Any]] = {}
    for file in files:
        if file.version is None or file.package_type not in {"wheel", "sdist"}:
            continue
        try:
            version = Version(file.version)
        except InvalidVersion:
            continue  # legacy versions that no resolver of today accepts
        if version.dev is None and version.local is None:
            by_version.setdefault(version, []).append(file)
    picks = [(version, one) for version in sorted(by_version) if (one := _pick_one(version, by_version[version], name))]
    if not window:
        return [one for _, one in picks]
    floor = Version(FLOORS.get(name, "9999999"))
    before = [version for version, one in picks if one.uploaded < SINCE and not version.is_prerelease]
    last_before = before[-1] if before else None
    return [one for version, one in picks if one.uploaded >= SINCE or version >= floor or version == last_before]


def _pick_one(version: Any, files: list[Any], name: str) -> Pick | None:
    yanked = all(file.is_yanked for file in files)
    files = [file for file in files if yanked or not file.is_yanked]
    tagged = [(tag, file) for file in files if file.package_type == "wheel" and (tag := linux_tag(file.filename))]
    sdists = sorted((file for file in files if file.package_type == "sdist"), key=lambda file: file.filename)
    if not tagged and not sdists:
        return None
    counted = [file for _, file in tagged] + sdists
    if any(file.upload_time is None for file in counted):
        raise IndexUnreachableError(
            f"the package index gives no upload times for {name}",
            "point pip's index-url at an index that serves them (PEP 700)",
        )
    tag, chosen = max(tagged, key=lambda pair: (_preference(pair[0]), pair[1].filename)) if tagged else ("", sdists[-1])
    return Pick(
        version=str(version),
        uploaded=min(file.upload_time for file in counted).strftime("%Y-%m-%d"),
        python=_specifier(chosen.requires_python),
        wheels=tuple(sorted({tag for tag, _ in tagged})),
        sdist=bool(sdists),
        yanked=yanked,
        size=(chosen.size or 0) if tag.endswith(("x86_64", "-any")) else 0,
        wheel=bool(tagged),
        file=chosen,
    )


def linux_tag(filename: str) -> str | None:
    """The part of a wheel's compressed tag set that Linux on x86_64 or aarch64 can use; None where there is none."""
    pythons, abis, platforms = filename.removesuffix(".whl").split("-")[-3:]
    kept = [one for one in platforms.split(".") if re.fullmatch(r"any|(many)?linux.*_(x86_64|aarch64)", one)]
    ours = [python for python in pythons.split(".") if re.fullmatch(r"py3\d*|cp3\d+", python)]
    abis_kept = [abi for abi in abis.split(".") if not re.fullmatch(r"cp\d+t|pypy.*|graalpy.*", abi)]
    return "-".join([".".join(ours), ".".join(abis_kept), ".".join(kept)]) if kept and ours and abis_kept else None


def _preference(tag: str) -> tuple[int, int, str]:
    python, _, platform = tag.split("-")
    newest = max((int(found) for found in re.findall(r"cp3(\d+)", python)), default=0)
    return (2 if platform.endswith("x86_64") else 1 if platform == "any" else 0), newest, tag


def _specifier(text: str | None) -> str:
    """Requires-Python in one spelling; as it stands where it is no valid specifier."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return ",".join(sorted(str(part) for part in SpecifierSet(text or "")))
    except InvalidSpecifier:
        return text or ""


def keep(name: str, lines: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The Requires-Dist lines that go into the file, each in one spelling, sorted; and those that cannot be read.

    A direct reference to a wheel becomes `name==version` of that wheel, any other one its bare name: the files name no
    hosts, and a plan pins versions.
    """
    from packaging.requirements import InvalidRequirement
    from packaging.utils import canonicalize_name

    kept, unreadable = set(), []
    for line in lines:
        try:
            requirement, extras = _parsed(line)
        except InvalidRequirement:
            unreadable.append(line)
            continue
        gone = DROPPED_EXTRAS_OF.get(name, set())
        if extras and all(extra in gone or DROPPED_EXTRAS.fullmatch(extra) for extra in extras):
            continue
        library = DROPPED_NAMES_OF.get(name)
        if library and library.fullmatch(canonicalize_name(line_name(requirement))):
            continue
        kept.add(requirement)
    return tuple(sorted(kept)), tuple(unreadable)


def line_name(line: str) -> str:
    """The package that a requirement line names."""
    found = re.match(r"[A-Za-z0-9._-]+", line)
    return found.group() if found else ""


@lru_cache(maxsize=65536)
def _parsed(line: str) -> tuple[str, tuple[str, ...]]:
    """One requirement line in one spelling, and the extras that its marker names."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    requirement = Requirement(line)
    if requirement.url:
        filename = re.split(r"[?#]", requirement.url)[0].rpartition("/")[2].replace("%2B", "+")
        requirement.url = None
        with suppress(InvalidWheelFilename):
            requirement.specifier = SpecifierSet(f"=={parse_wheel_filename(filename)[1]}")
    marker = str(requirement.marker or "")
    return str(requirement), tuple(re.findall(r'extra == "([^"]*)"', marker))
