"""A bundle: one folder with all that a plan's image is built and proven from, for places without network.

bundle.json    what belongs to it, each file with its SHA-256; written last, so that half a bundle is none
project/       image.yaml with the files that it names, plan.json, pylock.toml, requirements.txt
wheels/        every file of the lock
base/          the base image: an OCI layout
debs/          system packages with their index (only where the image has some)
model/         what the proof's model is made from, or the model itself
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.errors import DataError, OutsideError, UsageError
from envforge.files import write_atomic
from envforge.image import oci
from envforge.image.engines import ContainerEngine, Mount
from envforge.image.failures import explain
from envforge.image.split import to_compile
from envforge.image.system import archive_mounts
from envforge.image.values import BaseInfo, Event, InstallSource, Progress, silent
from envforge.keep.download import copy_file, download, sha256_of
from envforge.lock import Lock, PipSettings
from envforge.lock.read import read_lock
from envforge.project import plan_of
from envforge.spec import SPEC_FILE, Spec, load_spec

if TYPE_CHECKING:
    from envforge.resolver.plan import Plan

FILE = "bundle.json"
SCHEMA = 1
PROJECT, WHEELS, BASE, DEBS, MODEL = "project", "wheels", "base", "debs", "model"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A whole bundle.

    base: what `build` knows of the base: {"ref", "digest", "id", "name"}, None where it was bundled for the venv
    engine. system: system packages with their versions.
    """

    folder: Path
    plan: Plan
    lock: Lock
    spec: Spec
    base: Mapping[str, str] | None
    system: Mapping[str, str]

    @property
    def wheels(self) -> Path:
        """The folder of wheels."""
        return self.folder / WHEELS

    @property
    def debs(self) -> Path | None:
        """The folder of system packages, None where the image has none."""
        return self.folder / DEBS if self.system else None

    @property
    def model(self) -> Path | None:
        """The folder of the model or of its parts."""
        return self.folder / MODEL if (self.folder / MODEL).is_dir() else None

    def base_name(self) -> str:
        """The name that the base has once it is loaded.

        Raises:
            UsageError: the bundle has none.
        """
        if self.base is None:
            raise UsageError(f"{self.folder} holds no base image: it was made for the venv engine", "bundle it again")
        return self.base["name"]


def is_bundle(folder: Path) -> bool:
    """Whether a folder is a bundle, whole or not."""
    return (folder / FILE).is_file() or (folder / PROJECT / SPEC_FILE).is_file()


def read_bundle(folder: Path, progress: Progress = silent) -> Bundle:
    """A bundle, every file of it compared with its hash.

    Raises:
        UsageError: there is none, or it was never finished. DataError: a file is missing or damaged.
    """
    again = f"run envforge bundle again into {folder}: what is whole is kept"
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
        files, base, system = dict(data["files"]), data["base"], dict(data["system"])
        if data["schema"] != SCHEMA:
            raise ValueError("unknown schema")
    except FileNotFoundError as error:
        raise UsageError(f"{folder} is a bundle that was not finished: it has no {FILE}", again) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / FILE} is damaged ({error})", again) from error
    progress(Event("stage", f"checking {len(files)} files of the bundle"))
    for name, digest in files.items():
        path = folder / name
        if not path.is_file() or sha256_of(path) != digest:
            raise DataError(f"{path} is {'damaged' if path.is_file() else 'missing'}", again)
    plan = plan_of(folder / PROJECT)
    lock = read_lock(folder / PROJECT, plan)
    return Bundle(folder, plan, lock, load_spec(folder / PROJECT / SPEC_FILE), base, system)


@dataclass
class Filling:
    """A bundle under way. Each step leaves only whole files, and does nothing where they are there already."""

    project: Path
    folder: Path
    settings: PipSettings
    source: InstallSource
    progress: Progress = silent

    def start(self) -> tuple[Plan, Lock, Spec]:
        """Check what is to be bundled, and copy the project.

        Raises:
            UsageError: the project has no plan or lock, something must be compiled, or the folder is another's.
        """
        plan = plan_of(self.project)
        lock = read_lock(self.project, plan)
        sources = sorted({*to_compile(plan, lock), *(p.name for p in lock.packages if p.kind == "source")})
        if sources:
            raise UsageError(
                f"{', '.join(sources)} must be compiled, and a bundle carries finished wheels only",
                "build its wheel once where there is network, and lock again with --wheelhouse",
            )
        spec = load_spec(self.project / SPEC_FILE)
        if self.folder.exists() and any(self.folder.iterdir()) and not is_bundle(self.folder):
            raise UsageError(f"{self.folder} holds something else", "name a new or empty folder")
        own = self.folder / PROJECT
        try:
            (self.folder / WHEELS).mkdir(parents=True, exist_ok=True)
            (self.folder / FILE).unlink(missing_ok=True)
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir()
        except OSError as error:
            raise OutsideError(f"cannot write in {self.folder}: {error.strerror}", "name another folder") from error
        for name in (SPEC_FILE, "plan.json", "pylock.toml", *spec.files.values()):
            target = own / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.project / name, target)
        write_atomic(own / "requirements.txt", lock.requirements)
        return plan, lock, spec

    def wheels(self, lock: Lock) -> None:
        """Every file of the lock.

        Raises:
            IndexUnreachableError, HashMismatchError, DiskFullError, OutsideError: see `download`.
        """
        from envforge.lock.availability import http_session

        total = sum(package.size or 0 for package in lock.packages)
        self.progress(Event("stage", f"{len(lock.packages)} wheels, {total / 1e6:,.0f} MB", total=total))
        with http_session(self.settings) as session:
            for package in lock.packages:
                target = self.folder / WHEELS / package.file
                hashes = tuple(digest.removeprefix("sha256:") for digest in package.hashes)
                if package.path:
                    copy_file(Path(package.path), target, hashes)
                elif package.url:
                    download(session, self.settings, package.url, target, hashes, self.progress)
                else:
                    raise DataError(f"the lock does not say where {package.name} is", "lock again")
        known = {package.file for package in lock.packages}
        for stale in (self.folder / WHEELS).iterdir():
            if stale.name not in known:
                stale.unlink()

    def base(self, engine: ContainerEngine, base: BaseInfo) -> dict[str, str]:
        """The base image, named so that loading it takes nobody else's name.

        Raises:
            EngineError and others: the engine does not deliver it.
        """
        target = self.folder / BASE
        image = engine.inspect(base.ref)
        if image is None:
            raise OutsideError(f"the engine has no image {base.ref}", "name another with --base")
        name = f"envforge-base:{image.id.removeprefix('sha256:')[:12]}"
        row = {"ref": base.ref, "digest": base.digest, "id": image.id, "name": name}
        if not _whole(target, image.id):
            shutil.rmtree(target, ignore_errors=True)
            self.progress(Event("stage", f"the base image, {image.size / 1e6:,.0f} MB"))
            with tempfile.TemporaryDirectory(prefix=".base-", dir=self.folder) as scratch:
                archive = Path(scratch) / "base.tar"
                engine.save(image, archive)
                row["id"] = oci.to_layout(archive, Path(scratch) / BASE, name)
                (Path(scratch) / BASE).rename(target)
        return row

    def debs(self, engine: ContainerEngine, base: BaseInfo, versions: Mapping[str, str], network: str | None) -> None:
        """The system packages in exactly these versions, with what they need on this base.

        Raises:
            OutsideError: the archive does not deliver them.
        """
        target, stamp = self.folder / DEBS, json.dumps([base.digest, dict(sorted(versions.items()))])
        if (target / "asked.json").is_file() and (target / "asked.json").read_text() == stamp:
            return
        shutil.rmtree(target, ignore_errors=True)
        if not versions:
            return
        self.progress(Event("stage", f"{len(versions)} system packages and what they need"))
        with tempfile.TemporaryDirectory(prefix=".debs-", dir=self.folder) as scratch:
            fresh = Path(scratch) / DEBS
            fresh.mkdir()
            words = ["/bin/sh", "/run/envforge/scripts/system.sh", "--fetch", "/run/envforge/out"]
            words += [f"{name}={version}" for name, version in sorted(versions.items())]
            settings = Path(scratch) / "settings"
            settings.mkdir()
            mounts = (*archive_mounts(self.source, settings), Mount(fresh, "/run/envforge/out", writable=True))
            done = engine.run(base.ref, words, mounts=mounts, network=network or "host", user="0:0")
            if done.code != 0:
                raise explain(done.output.splitlines())
            (fresh / "asked.json").write_text(stamp)
            fresh.rename(target)

    def finish(self, plan: Plan, lock: Lock, base: Mapping[str, str] | None, versions: Mapping[str, str]) -> Path:
        """The list of all files with their hashes: from now on it is a bundle."""
        names = [PROJECT, WHEELS, BASE, DEBS, MODEL]
        paths = [path for name in names for path in sorted((self.folder / name).rglob("*")) if path.is_file()]
        files = {str(path.relative_to(self.folder)): sha256_of(path) for path in paths if path.suffix != ".part"}
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "plan_hash": plan.hash(),
            "lock_hash": lock.hash,
            "base": dict(base) if base else None,
            "system": dict(versions),
            "bytes": sum(path.stat().st_size for path in paths),
            "files": files,
        }
        write_atomic(self.folder / FILE, json.dumps(data, indent=1) + "\n")
        return self.folder / FILE


def _whole(layout: Path, image: str) -> bool:
    """Whether a layout is there and holds that image, every blob as its name says."""
    if not (layout / "manifest.json").is_file():
        return False
    blobs = list((layout / "blobs" / "sha256").iterdir())
    return any(blob.name == image.removeprefix("sha256:") for blob in blobs) and all(
        sha256_of(blob) == blob.name for blob in blobs
    )


def load_base(bundle: Bundle, engine: ContainerEngine, progress: Progress = silent) -> str:
    """The bundle's base in the engine, loaded where it is not there yet; returns its name.

    Raises:
        UsageError: the bundle has no base.
    """
    name, known = bundle.base_name(), bundle.base or {}
    there = engine.inspect(name)
    if there is None or there.id != known["id"]:
        progress(Event("stage", "loading the base image"))
        with tempfile.TemporaryDirectory(prefix="envforge-base-") as scratch:
            archive = Path(scratch) / "base.tar"
            oci.to_archive(bundle.folder / BASE, archive)
            engine.load(archive)
    return name


def offline(source: InstallSource, bundle: Bundle) -> InstallSource:
    """Where packages come from when everything is in the bundle: nowhere else."""
    return replace(
        source,
        uv_config="no-index = true\n",
        wheelhouses=(bundle.wheels,),
        secret=False,
        arguments=("--no-index",),
        apt=None,
        registry=None,
        debs=bundle.debs,
    )
