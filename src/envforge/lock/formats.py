"""The lock itself, and its two files: requirements.txt and pylock.toml, both from one answer of uv's."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from envforge.errors import DataError, OutsideError
from envforge.files import LOCK_HEAD, REQUIREMENTS
from envforge.lock.settings import redact

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

PYLOCK = "pylock.toml"
WHEELS = "wheels"  # folder beside the lock for wheels that were built from local requests
IndexKind = Literal["default", "torch", "find-links", "source"]
KINDS: tuple[IndexKind, ...] = ("default", "torch", "find-links", "source")


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """One package of the closure.

    version: with its local part ("2.6.0+cu126"). hashes: "sha256:<hex>", at least one. size: bytes of `file`, None
    where no index said so. kind: where it came from; `source` = a source archive that is built when it is installed.
    uploaded: ISO date, None where unknown. url: without credentials; path: for files on this machine.
    """

    name: str
    version: str
    kind: IndexKind
    hashes: tuple[str, ...]
    file: str
    size: int | None = None
    uploaded: str | None = None
    url: str | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Lock:
    """A closed set of packages, each with its hash, for one Python on one platform.

    requirements, pylock: the texts of the two files. hash: hex SHA-256 of the canonical requirements (name, version,
    hashes; not where they come from). exempted: packages that were let past the plan's date because nothing solved
    otherwise. excluded: `name!=version` that were ruled out because their Requires-Python does not allow this Python.
    left_out: packages that something declares but that were kept out. warnings: for the user. calls and
    seconds: what uv took.
    """

    requirements: str
    pylock: str
    packages: tuple[LockedPackage, ...]
    hash: str
    python: str
    platform: str
    variant: str
    index_kinds: Mapping[str, IndexKind] = field(default_factory=dict)
    torch_index: str | None = None
    exempted: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    calls: int = 0
    seconds: float = 0.0

    @property
    def size(self) -> int:
        """Bytes to download, as far as known."""
        return sum(package.size or 0 for package in self.packages)

    def package(self, name: str) -> LockedPackage | None:
        """The package of this (normalised) name."""
        return next((package for package in self.packages if package.name == name), None)


def parse_pylock(text: str, *, torch_names: Iterable[str] = (), links: Iterable[str] = ()) -> list[LockedPackage]:
    """uv's pylock.toml -> packages, sorted by name.

    Args:
        torch_names: packages that were sent to the PyTorch index. links: local folders of wheels.

    Raises:
        OutsideError: not such a file, or a package in it has no hash.
    """
    try:
        rows = tomllib.loads(text)["packages"]
        return sorted((_package(row, set(torch_names), tuple(links)) for row in rows), key=lambda package: package.name)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, IndexError) as error:
        raise OutsideError(f"uv's answer is not a pylock.toml ({error})", "check uv: uv --version", id="uv") from error


def _package(row: Mapping[str, Any], torch_names: set[str], links: tuple[str, ...]) -> LockedPackage:
    name, version = str(row["name"]), str(row["version"])
    wheels = row.get("wheels") or []
    archive = row.get("archive")  # a wheel of ours, asked for by its address
    chosen: Mapping[str, Any] = archive or (wheels[0] if wheels else row["sdist"])
    url = str(chosen.get("url") or "")
    path = str(chosen.get("path") or (unquote(urlsplit(url).path) if url.startswith("file:") else ""))
    hashes = tuple(f"{kind}:{value}" for kind, value in sorted(chosen.get("hashes", {}).items()))
    if not hashes and path and Path(path).is_file():  # uv does not hash every file that lies here
        hashes = (f"sha256:{file_sha256(Path(path))}",)
    if not hashes:
        raise OutsideError(
            f"no index gives a hash for {name} {version}", "ask its index to publish hashes", id="no-hash"
        )
    folder = str(Path(path).parent) if path else ""
    kind: IndexKind = "default"
    if archive:
        kind = "find-links"
    elif not wheels:
        kind = "source"
    elif folder and folder in links:
        kind = "find-links"
    elif name in torch_names:
        kind = "torch"
    size = chosen.get("size")
    if size is None and path and Path(path).is_file():
        size = Path(path).stat().st_size
    uploaded = chosen.get("upload-time")
    return LockedPackage(
        name=name,
        version=version,
        kind=kind,
        hashes=hashes,
        file=unquote((path or urlsplit(url).path).rpartition("/")[2]),
        size=size,
        uploaded=uploaded.date().isoformat() if uploaded is not None else None,
        url=redact(url) if url and not path else None,
        path=path or None,
    )


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def canonical(packages: Iterable[LockedPackage]) -> str:
    """The lines that the lock's hash covers."""
    return "".join(f"{p.name}=={p.version} {' '.join(p.hashes)}\n" for p in packages)


def lock_hash(packages: Iterable[LockedPackage]) -> str:
    """Hex SHA-256 of `canonical`."""
    return hashlib.sha256(canonical(packages).encode()).hexdigest()


def requirements_text(
    packages: Iterable[LockedPackage], *, python: str, platform: str, variant: str, torch_index: str | None, local: bool
) -> str:
    """requirements.txt: hashed lines; no address in it but the PyTorch index's, where something comes from there.

    pip and uv read it (`--require-hashes`); hashes make it safe that they look at all indexes alike.
    """
    lines = [f"{LOCK_HEAD}: Python {python}, {variant}, {platform}"]
    if torch_index:
        lines.append(f"--extra-index-url {redact(torch_index)}")
    if local:
        lines.append(f"--find-links ./{WHEELS}")
    for package in packages:
        if package.kind == "source":
            lines.append(f"# {package.name} is built from source when it is installed")
        lines.append(f"{package.name}=={package.version} \\")
        lines += [f"    --hash={digest} \\" for digest in package.hashes]
        lines[-1] = lines[-1][:-2]
    return "\n".join(lines) + "\n"


def pylock_text(uv_text: str, lock_row: Mapping[str, str], wheel_folder: Path | None) -> str:
    """uv's pylock.toml without credentials, our own wheels by relative path, and a table that says what it is for."""
    text = redact(uv_text)
    if wheel_folder is not None:
        stem = re.escape(str(wheel_folder.absolute()))
        text = re.sub(rf'path = "{stem}/([^"]+)"', rf'path = "{WHEELS}/\1"', text)
    table = "".join(f'{key} = "{value}"\n' for key, value in sorted(lock_row.items()))
    return f"{text.rstrip()}\n\n[tool.envforge]\n{table}"


_LINE = re.compile(r"^([a-z0-9-]+)==(\S+)((?:\s+--hash=\S+)+)$")


def read_requirements(text: str, where: str = REQUIREMENTS) -> list[LockedPackage]:
    """A lock's requirements.txt -> packages (kind: source or, unknown, default).

    Raises:
        DataError: a line is not `name==version --hash=...`.
    """
    packages: list[LockedPackage] = []
    source: set[str] = set()
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = line.strip()
        noted = re.match(r"# (\S+) is built from source", line)
        if noted:
            source.add(noted[1])
        if not line or line.startswith(("#", "--extra-index-url ", "--find-links ")):
            continue
        found = _LINE.match(line)
        if not found:
            raise DataError(
                f"{where}: {line[:80]!r} is not a line of a lock", "lock again with envforge resolve --lock"
            )
        hashes = tuple(part.removeprefix("--hash=") for part in found[3].split())
        packages.append(
            LockedPackage(found[1], found[2], "source" if found[1] in source else "default", hashes, file="")
        )
    return packages
