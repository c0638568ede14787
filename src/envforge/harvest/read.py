"""Reads what distributions declare and contain, without downloading wheels whole or running any code of theirs."""

from __future__ import annotations

import ast
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from envforge.errors import IndexUnreachableError, UsageError
from envforge.files import write_atomic
from envforge.harvest.choose import Pick, pick
from envforge.harvest.index import MIB, Index
from envforge.matrix.releases import RequiresFrom


class Store:
    """The requirements of files read so far, one small JSON file each: {"sha256", "requires", "from"}."""

    def __init__(self, cache: Path, name: str) -> None:
        self.folder = cache / name

    def get(self, filename: str, sha256: str) -> tuple[list[str], RequiresFrom] | None:
        """What was read from exactly this file, if anything was."""
        try:
            data = json.loads((self.folder / f"{filename}.json").read_text(encoding="utf-8"))
            if data["sha256"] == sha256:
                return [str(line) for line in data["requires"]], data["from"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or damaged: read it again
        return None

    def put(self, filename: str, sha256: str, lines: list[str], origin: RequiresFrom) -> None:
        """Keeps it for later runs."""
        text = json.dumps({"sha256": sha256, "requires": lines, "from": origin})
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / f"{filename}.json", text)


def cache_folder() -> Path:
    """Where harvested metadata is kept between runs."""
    from platformdirs import user_cache_path

    return user_cache_path("envforge") / "harvest"


@dataclass
class Reader:
    """Finds the requirements of single releases; safe to call from several threads."""

    index: Index
    store: Store
    name: str
    json_misses: int = field(default=0, init=False)  # in a row; an index that has no such answers is not asked for ever

    def requirements(self, one: Pick) -> tuple[list[str], RequiresFrom]:
        """The Requires-Dist lines of one release and where they stand; [] and "unknown" where nothing declares them.

        Raises:
            IndexUnreachableError: the index did not answer, or a file is not what its name says.
        """
        sha256 = one.file.digests.get("sha256", "")
        found = self.store.get(one.file.filename, sha256)
        if found is None:
            found = self._from_wheel(one) if one.wheel else self._from_sdist(one)
            if found[1] != "unknown":
                self.store.put(one.file.filename, sha256, *found)
        return found

    def _from_wheel(self, one: Pick) -> tuple[list[str], RequiresFrom]:
        if one.file.has_metadata:
            answer = self.index.get(one.file.metadata_url, limit=16 * MIB)
            if answer is not None:
                self._check_digest(one.file, answer.body)
                return requires_dist(answer.body, one.file.filename), "wheel"
        members = self.index_members(one.file.url, lambda names: [n for n in names if _is_metadata(n)][:1])
        if members is not None:
            if not members:
                raise IndexUnreachableError(f"{one.file.filename} has no METADATA: not a wheel")
            return requires_dist(next(iter(members.values())), one.file.filename), "wheel"
        return self._from_index_json(one)

    def _check_digest(self, file: Any, body: bytes) -> None:
        import hashlib

        expected = (file.metadata_digests or {}).get("sha256")
        if expected and hashlib.sha256(body).hexdigest() != expected:
            raise IndexUnreachableError(
                f"the METADATA of {file.filename} does not have the hash that the index page gives for it",
                "try again later; a mirror in between may be out of step",
            )

    def index_members(self, url: str, choose: Callable[[list[str]], list[str]]) -> dict[str, bytes] | None:
        """The chosen members of a wheel by ranged reads; None where the server gives no ranges."""
        wheel = self.index.wheel(url)
        if wheel is None:
            return None
        try:
            with wheel:
                return {name: wheel.read(name) for name in choose(wheel.namelist())}
        except (BadZipFile, ValueError, EOFError) as error:
            raise IndexUnreachableError(f"{self.index.shown(url)} is not a readable wheel ({error})") from error

    def _from_index_json(self, one: Pick) -> tuple[list[str], RequiresFrom]:
        if self.json_misses >= 3 or not self.index.base.endswith("/simple"):
            return [], "unknown"
        url = f"{self.index.base.removesuffix('/simple')}/pypi/{self.name}/{one.version}/json"
        answer = self.index.get(url, limit=16 * MIB)
        if answer is None:
            self.json_misses += 1
            return [], "unknown"
        self.json_misses = 0
        try:
            info = json.loads(answer.body)["info"]
            lines = info["requires_dist"]
            if info["version"] != one.version or not all(isinstance(line, str) for line in lines or []):
                raise ValueError("another release")
        except (ValueError, KeyError, TypeError) as error:
            raise IndexUnreachableError(f"{self.index.shown(url)} is not release JSON ({error})") from error
        # null means that the index read none, which is not the same as none declared
        return (list(lines), "index") if lines is not None else ([], "unknown")

    def _from_sdist(self, one: Pick) -> tuple[list[str], RequiresFrom]:
        answer = self.index.get(one.file.url)
        if answer is None:
            return [], "unknown"
        texts = sdist_texts(answer.body, one.file.filename)
        lines = requires_dist(texts.get("PKG-INFO", b""), one.file.filename, complete=False)
        if lines:
            return lines, "sdist"
        if "requires.txt" in texts:
            return from_requires_txt(_text(texts["requires.txt"])), "sdist-requires-txt"
        for member in ("requirements/requirements.txt", "requirements.txt"):
            if member in texts:
                return from_requirements(_text(texts[member])), "sdist-requirements"
        return [], "unknown"


def _is_metadata(member: str) -> bool:
    return re.fullmatch(r"[^/]+\.dist-info/METADATA", member) is not None


def _text(body: bytes) -> str:
    return body.decode("utf-8", errors="replace")


def requires_dist(body: bytes, filename: str, *, complete: bool = True) -> list[str]:
    """The Requires-Dist lines of a METADATA or PKG-INFO text.

    Raises:
        IndexUnreachableError: `complete` and the text is no core metadata (it lacks its version and name).
    """
    from email.parser import HeaderParser

    message = HeaderParser().parsestr(_text(body))
    if complete and not (message.get("Metadata-Version") and message.get("Name")):
        raise IndexUnreachableError(f"the METADATA of {filename} is not core metadata")
    return [" ".join(str(line).split()) for line in message.get_all("Requires-Dist", [])]


SDIST_MEMBERS = ("PKG-INFO", "requires.txt", "requirements/requirements.txt", "requirements.txt")


def sdist_texts(body: bytes, filename: str) -> dict[str, bytes]:
    """The files of a source archive that may declare requirements, by their names in SDIST_MEMBERS.

    Raises:
        IndexUnreachableError: not an archive.
    """
    out: dict[str, bytes] = {}
    try:
        if filename.endswith(".zip"):
            with ZipFile(io.BytesIO(body)) as archive:
                for info in archive.infolist():
                    if (member := _sdist_member(info.filename)) and info.file_size <= MIB:
                        out.setdefault(member, archive.read(info))
        else:
            with tarfile.open(fileobj=io.BytesIO(body)) as tar:
                for entry in tar:
                    if (member := _sdist_member(entry.name)) and entry.isfile() and entry.size <= MIB:
                        file = tar.extractfile(entry)
                        out.setdefault(member, file.read() if file else b"")
    except (tarfile.TarError, BadZipFile, EOFError, OSError, ValueError) as error:
        raise IndexUnreachableError(f"{filename} is not a readable source archive ({error})") from error
    return out


def _sdist_member(path: str) -> str | None:
    inner = path.partition("/")[2]
    if re.fullmatch(r"(src/)?[^/]+\.egg-info/requires\.txt", inner):
        return "requires.txt"
    return inner if inner in SDIST_MEMBERS[:1] + SDIST_MEMBERS[2:] else None


def from_requires_txt(text: str) -> list[str]:
    """The lines of an egg-info requires.txt (sections "[extra:marker]") as Requires-Dist lines."""
    out, extra, condition = [], "", ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            extra, _, condition = line[1:-1].partition(":")
        elif line and not line.startswith("#"):
            body, _, own = line.partition(";")
            parts = [f"({part.strip()})" for part in (own, condition) if part.strip()]
            parts += [f'extra == "{extra}"'] if extra else []
            out.append(body.strip() + (" ; " + " and ".join(parts) if parts else ""))
    return out


def from_requirements(text: str) -> list[str]:
    """The requirement lines of a plain requirements file; options, comments and includes are left out."""
    lines = (re.split(r"(?:^|\s)#", line)[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("-")]


def _wheel_of(name: str, version: str, index: Index) -> Any:
    from packaging.version import InvalidVersion, Version

    try:
        wanted = str(Version(version))
    except InvalidVersion as error:
        raise UsageError(f"not a version: {version!r}", "give it as the index shows it, for example 0.43.1") from error
    picks: Sequence[Pick] = pick(name, index.page(name).packages, window=False)
    for one in picks:
        if one.version == wanted and one.wheel:
            return one.file
    newest = picks[-1].version if picks else "no release at all"
    raise UsageError(f"the package index has no Linux wheel of {name} {version}", f"its newest release there: {newest}")


def _members(name: str, version: str, index: Index, choose: Callable[[list[str]], list[str]]) -> dict[str, bytes]:
    file = _wheel_of(name, version, index)
    found = Reader(index, Store(cache_folder(), name), name).index_members(file.url, choose)
    if found is None:
        raise IndexUnreachableError(
            f"the server of {file.filename} gives no ranged reads",
            "its file list cannot be read without downloading it whole; point pip's index-url at an index that does",
        )
    return found


def wheel_files(name: str, version: str, index: Index) -> list[str]:
    """The file list of the Linux x86_64 wheel of one release (newest Python), sorted, by ranged reads.

    Raises:
        UsageError: no such wheel. IndexUnreachableError: the index did not answer, or gives no ranged reads.
    """
    names: list[str] = []

    def look(found: list[str]) -> list[str]:
        names.extend(found)
        return []

    _members(name, version, index, look)
    return sorted(names)


def cuda_libraries(files: Iterable[str], stem: str = "libbitsandbytes_cuda", *, suffix: str = "") -> tuple[str, ...]:
    """The CUDA versions ("118", "126") that a wheel's file list has a native library for, sorted.

    `suffix="_nocublaslt"` lists the libraries that bitsandbytes before 0.45 loads on GPUs below 7.5; for CUDA 10.2, and
    throughout 0.36.0, it has no other.
    """
    found = (re.fullmatch(rf".*/{re.escape(stem)}(\d+){re.escape(suffix)}\.so", file) for file in files)
    return tuple(sorted({match.group(1) for match in found if match}))


@dataclass(frozen=True, slots=True)
class Floors:
    """What a transformers release checks inside itself, beyond its metadata.

    table: package -> PEP 440 specifier of its dependency table ("" = any); minimums: its *_MIN_VERSION constants by
    lower-case package name ("accelerate" -> "1.1.0"); torch: the version below which it turns torch off, None where it
    never does; peft: the minimum for adapters loaded through it.
    """

    version: str
    table: dict[str, str]
    minimums: dict[str, str]
    torch: str | None
    peft: str | None


def transformers_floors(version: str, index: Index) -> Floors:
    """Reads the floors of one transformers release from its wheel by ranged reads; nothing of it is run.

    Raises:
        UsageError, IndexUnreachableError: as `wheel_files`; also where the dependency table is not where it was.
    """
    table, imports, peft = (
        "transformers/dependency_versions_table.py",
        "transformers/utils/import_utils.py",
        "transformers/integrations/peft.py",
    )
    wanted = (table, imports, peft)
    found = _members("transformers", version, index, lambda names: [one for one in wanted if one in names])
    if table not in found or imports not in found:
        raise IndexUnreachableError(f"transformers {version} has no {table} or {imports}: its layout changed")
    text = _text(found[imports])
    minimum = re.search(r"because PyTorch >= ([\d.]+) is required", text)
    adapter = re.search(r'^MIN_PEFT_VERSION = "([^"]+)"', _text(found.get(peft, b"")), re.MULTILINE)
    return Floors(
        version=version,
        table=_dependency_table(_text(found[table])),
        minimums={
            m[0].lower().replace("_", "-"): m[1] for m in re.findall(r'^(\w+)_MIN_VERSION = "([^"]+)"', text, re.M)
        },
        torch=minimum.group(1) if minimum else None,
        peft=adapter.group(1) if adapter else None,
    )


def _dependency_table(source: str) -> dict[str, str]:
    from packaging.requirements import Requirement

    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "deps":
            rows = {str(key): Requirement(str(line)) for key, line in ast.literal_eval(node.value).items()}
            return {key: str(row.specifier) for key, row in rows.items()}
    raise IndexUnreachableError("the dependency table of transformers is not a dictionary `deps` any more")
