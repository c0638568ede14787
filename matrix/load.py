"""Reads the hand-written matrix: strict and complete when files changed, almost free when they did not.

A cold load parses and checks every file (YAML, schema, meaning) and reports all faults at once. Its result is kept in
the user's cache folder under the SHA-256 of everything it came from, so that a warm load reads and hashes the files,
decodes one JSON file and builds the values: it needs neither PyYAML nor jsonschema nor packaging. A missing, damaged
or unwritable cache only costs time.

Layers (`matrix.d` folders or single files) have the same format: a row with the same identity replaces the one below,
any other row is added.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from envforge.cached import Cache, cache_folder
from envforge.errors import DataError
from envforge.matrix.model import (
    Architecture,
    Base,
    Branch,
    Family,
    ForwardCompat,
    Gpu,
    Matrix,
    NativeLib,
    Note,
    PackageRow,
    Policy,
    RemoteModel,
    Rule,
    Source,
    Toolkit,
    TorchBuild,
)

HERE = Path(__file__).parent
DATA = HERE / "data"
SCHEMA = HERE / "schema" / "data.json"
NOT_OURS = ("diagnoses.yaml",)  # read by the diagnosis, with a schema of its own
FORMAT = 1  # of the cached form
KEEP = 8  # cached results that are left lying

Rows = dict[str, list[dict[str, Any]]]  # section -> rows with expanded sources, in file order


def load_matrix(
    folder: Path = DATA, layers: tuple[Path, ...] = (), *, cache: Path | None = None, use_cache: bool = True
) -> Matrix:
    """The matrix of `folder` with `layers` on top, lowest first.

    Args:
        folder: the shipped data, or a copy of it.
        layers: folders (every .yaml in them) or files of further rows.
        cache: where validated results are kept; the user's cache folder unless given.
        use_cache: neither read nor write a cache.

    Raises:
        DataError: every fault of every file, as "file:line: section row N field X: ...".
    """
    files = collect(folder, layers)
    matrix_hash = hash_files(files)
    key = hashlib.sha256(f"{FORMAT} {matrix_hash} {_code_hash()}".encode()).hexdigest()
    names = ("shipped", *(str(layer) for layer in layers))
    kept = Cache((cache or cache_folder("matrix")) if use_cache else None, KEEP)
    rows = kept.read_json(f"{key}.json")
    if not isinstance(rows, dict):
        from envforge.matrix.meaning import read_rows

        schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
        rows = read_rows([(file.where, file.layer, file.raw) for file in files], schema)
        kept.write_json(f"{key}.json", rows)
    return build(rows, matrix_hash, names)


def build(rows: Mapping[str, Sequence[Mapping[str, Any]]], matrix_hash: str, layers: tuple[str, ...]) -> Matrix:
    """Checked rows -> Matrix."""
    sources: dict[tuple[str, str], Source] = {}

    def src(row: Mapping[str, Any]) -> Source:
        text, confidence = row["source"]
        found = sources.get((text, confidence))
        if found is None:
            found = sources[(text, confidence)] = Source(text, confidence)
        return found

    def words(row: Mapping[str, Any], field: str) -> tuple[str, ...]:
        return tuple(row.get(field, "").split())

    def get(section: str) -> Sequence[Mapping[str, Any]]:
        return rows.get(section, ())

    systems = {row["os"]: row for row in get("systems")}
    policy = get("policy")[0]
    return Matrix(
        toolkits=tuple(Toolkit(r["cuda"], r["release"], r["driver"], r["branch"], src(r)) for r in get("toolkits")),
        families=tuple(Family(r["major"], r["min_driver"], src(r)) for r in get("families")),
        branches=tuple(Branch(r["branch"], r["cuda"], r.get("type"), r.get("eol"), src(r)) for r in get("branches")),
        forward=tuple(ForwardCompat(r["cuda"], r["package"], tuple(r["branches"]), src(r)) for r in get("forward")),
        architectures=tuple(
            Architecture(r["name"], words(r, "sm"), r["first_cuda"], r.get("last_cuda"), r.get("last_branch"), src(r))
            for r in get("architectures")
        ),
        gpus=tuple(_gpu(r, src(r)) for r in get("gpus")),
        torch_builds=tuple(
            TorchBuild(
                torch=r["torch"],
                variant=r["variant"],
                cuda=r.get("cuda"),
                arch=r["arch"],
                sm=words(r, "sm"),
                ptx=words(r, "ptx"),
                default=r.get("default", False),
                source=src(r),
            )
            for r in get("torch")
        ),
        packages={
            r["name"]: PackageRow(
                name=r["name"],
                role=r["role"],
                rank=r["rank"],
                summary=r["summary"],
                import_name=r.get("import"),
                source=src(r),
                sources_ok=r.get("sources_ok", False),
            )
            for r in sorted(get("packages"), key=lambda r: r["rank"])
        },
        native=tuple(
            NativeLib(
                package=r["package"],
                versions=r["versions"],
                cuda=words(r, "cuda"),
                match=r["match"],
                sm=words(r, "sm"),
                ptx=words(r, "ptx"),
                source_only=r.get("source_only", False),
                source=src(r),
            )
            for r in get("native")
        ),
        rules=tuple(
            Rule(
                id=r["id"],
                level=r["level"],
                when=r["when"],
                needs=r.get("needs", {}),
                requires=r.get("requires", {}),
                text=r["text"],
                warning=(r.get("warning") or r["id"]) if r["level"] == "warn" else None,
                source=src(r),
            )
            for r in get("rules")
        ),
        bases=(
            *(
                Base(
                    ref=r["ref"],
                    digest=r.get("digest"),
                    os=r["os"],
                    glibc=r["glibc"],
                    pythons=words(r, "pythons"),
                    arch=tuple(r["arch"]),
                    kind=r["kind"],
                    cuda=r.get("cuda"),
                    source=src(r),
                )
                for r in get("bases")
            ),
            *(base for r in get("cuda_images") for base in _cuda_bases(r, systems[r["os"]], src(r))),
        ),
        policy=Policy(
            policy["as_of"], tuple(policy["pythons"].split()), policy["coherence_days"], policy["stale_days"]
        ),
        notes=tuple(Note(r["id"], r["about"], r["text"], src(r)) for r in get("notes")),
        hash=matrix_hash,
        layers=layers,
        remote_models=tuple(
            RemoteModel(r["family"], tuple(r["match"]), r["needs"], r["text"], src(r)) for r in get("remote_models")
        ),
    )


def _gpu(row: Mapping[str, Any], source: Source) -> Gpu:
    return Gpu(
        name=row["name"],
        sm=row["sm"],
        memory_gib=tuple(row["memory_gib"]),
        architecture=row["architecture"],
        bf16=row.get("bf16", False),
        fp8=row.get("fp8", False),
        data_center=row.get("data_center", False),
        forward=row.get("forward", False),
        first_cuda=row.get("first_cuda"),
        last_cuda_major=row.get("last_cuda_major"),
        first_branch=row.get("first_branch"),
        last_branch=row.get("last_branch"),
        arch=row.get("arch"),
        aliases=tuple(row.get("aliases", ())),
        source=source,
    )


def _cuda_bases(row: Mapping[str, Any], system: Mapping[str, Any], source: Source) -> list[Base]:
    """One row of `cuda_images` stands for one image per kind."""
    return [
        Base(
            ref=f"nvidia/cuda:{row['cuda']}-{kind}-{row['os']}",
            digest=None,
            os=row["os"],
            glibc=system["glibc"],
            pythons=tuple(system["pythons"].split()),
            arch=tuple(row["arch"]),
            kind=f"cuda-{kind}",  # type: ignore[arg-type]  # the schema allows base, runtime, devel
            cuda=row["cuda"].rpartition(".")[0],
            source=source,
        )
        for kind in row["kinds"]
    ]


class File(NamedTuple):
    """One file of a layer."""

    where: str  # name in messages
    layer: int  # 0 = shipped
    inside: str  # path inside its layer, the same on every machine
    raw: bytes


def collect(folder: Path, layers: tuple[Path, ...]) -> list[File]:
    """Every file, shipped first, sorted within a layer."""
    found = []
    for number, place in enumerate((folder, *layers)):
        if place.is_file():
            paths = [place]
        elif place.is_dir():
            paths = sorted(path for path in place.rglob("*.yaml") if path.name not in NOT_OURS)
        else:
            raise DataError(f"{place}: no such file or folder of matrix rows")
        for path in paths:
            inside = path.name if path == place else path.relative_to(place).as_posix()
            where = f"matrix/data/{inside}" if place is DATA else str(path)
            try:
                found.append(File(where, number, inside, path.read_bytes()))
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return found


def hash_files(files: Sequence[File]) -> str:
    """Hash of all rows; it does not depend on where a layer lies."""
    parts = (part for file in files for part in (f"{file.layer}/{file.inside}".encode(), file.raw))
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@lru_cache(maxsize=1)
def _code_hash() -> str:
    """Hash of what decides about the checked form: a new release of this code never reads an old result."""
    parts = [SCHEMA, *(HERE / name for name in ("load.py", "meaning.py", "strictyaml.py", "gpus.py", "model.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()
