"""The build context: every file that a build reads, put together from plan, lock, spec and this machine."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.errors import DataError, DiskFullError, OutsideError, UsageError
from envforge.files import no_space
from envforge.image import render
from envforge.image.address import VERIFY, content_address, image_tag, sha256, verify_files
from envforge.image.facts import preflight_facts
from envforge.image.sbom import FILE as SBOM_FILE
from envforge.image.sbom import PLACE as SBOM_PLACE
from envforge.image.sbom import make_sbom
from envforge.image.split import Requirement, normalise, parse_lock, split_lock, to_compile
from envforge.image.values import (
    LABEL_EPOCH,
    LABEL_SBOM,
    BaseInfo,
    BuildContext,
    ContextFile,
    Dialect,
    InstallSource,
    LockLike,
)
from envforge.resolver.plan import Plan

if TYPE_CHECKING:
    from envforge.spec import Spec

_PACKAGE_INIT = '"""The part of envforge that is inside every image: the proof."""\n'
_WHEEL = re.compile(r"^(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl$")
_SDIST = re.compile(r"^(?P<name>.+)-(?P<version>[^-]+)\.(tar\.gz|zip)$")


def make_context(
    plan: Plan,
    lock: LockLike,
    spec: Spec,
    base: BaseInfo,
    source: InstallSource,
    *,
    dialect: Dialect = "buildkit",
    epoch: int | None = None,
    network: str | None = None,
    compile_stage: render.Compile | None = None,
    kind: str = "image",
    system: Mapping[str, str] | None = None,
    reproducible: bool = False,
) -> BuildContext:
    """Everything that an engine needs to build one plan.

    Args:
        system: versions of the system packages, from `system_versions`; without them the archive's own count.
        reproducible: the image will be made timeless, and says so.

    Raises:
        DataError: a value of the spec that cannot be carried, or a file of the spec that is missing.
        UsageError: credentials in the index settings with the plain dialect, which has no secret mounts.
    """
    if dialect == "plain" and source.secret:
        raise UsageError(
            "the plain dialect has no secret mounts, and the package index needs a user name or password",
            "use --dialect buildkit, or an index without credentials",
        )
    if dialect == "plain" and source.debs is not None and kind == "image":
        raise UsageError(
            "the plain dialect cannot install system packages from a folder without leaving them in a layer",
            "use --dialect buildkit, or a mirror of the archive: --mirror apt=URL",
        )
    own_files = _spec_files(spec)
    address = content_address(plan, lock, spec, base, kind, system)
    parts = split_lock(lock.requirements, to_compile(plan, lock))
    labels = render.labels(plan, lock, spec, base, address, epoch)
    bill = make_sbom(spec.name, lock, base, address, debs=system or {}, epoch=epoch)
    labels[LABEL_SBOM] = f"{SBOM_PLACE}@sha256:{sha256(bill.encode())}"
    if reproducible:
        labels[LABEL_EPOCH] = str(epoch or 0)
    files: dict[str, ContextFile] = {f"image/{SBOM_FILE}": _text(bill)}
    dockerfile = ""
    if kind == "image":
        dockerfile = render.render_dockerfile(
            plan,
            lock,
            spec,
            base,
            labels,
            dialect=dialect,
            compile_stage=compile_stage,
            system=system,
            debs=source.debs is not None,
            apt=source.apt is not None,
        )
        files["Dockerfile"] = _text(dockerfile)
    for script in ("install.sh", "slim.py", "system.sh", "folders.sh", "tools.txt"):
        files[f"build/scripts/{script}"] = ContextFile((render.TEMPLATES / "image" / script).read_bytes(), True)
    files["build/uv/uv"] = ContextFile(uv_binary(), True)
    wheels = find_wheels(parse_lock(lock.requirements), source.wheelhouses)
    for part, text in (("torch", parts.torch), ("stack", parts.stack), ("compile", parts.compile)):
        if part == "compile" and not text:
            continue
        files[f"build/parts/{part}/requirements.txt"] = _text(text)
        files[f"build/parts/{part}/wheels/.keep"] = _text("")
        for requirement in parse_lock(text):
            for wheel in wheels.get(requirement.name, ()):
                files[f"build/parts/{part}/wheels/{wheel.name}"] = ContextFile(wheel)
    if dialect == "plain":
        files["build/settings/uv.toml"] = _text(source.uv_config)
        if source.ca is not None:
            files["build/settings/ca.pem"] = ContextFile(source.ca)
        if source.apt is not None:
            files["build/apt/apt.mirror"] = _text(source.apt)
    if source.debs is not None and kind == "image":
        for path in sorted(source.debs.iterdir()):
            files[f"build/debs/{path.name}"] = ContextFile(path)
    files.update({f"image/{path}": file for path, file in image_files(plan, lock, spec, address).items()})
    files.update({f"site/{path}": file for path, file in site_files().items()})
    for i, target in enumerate(sorted(spec.files)):
        files[f"files/{i:04d}"] = ContextFile(own_files[target], os.access(own_files[target], os.X_OK))
    return BuildContext(
        name=spec.name,
        tag=image_tag(plan, lock, spec, address),
        address=address,
        dockerfile=dockerfile,
        files=files,
        labels=labels,
        source=source,
        base=base,
        python=plan.python,
        dialect=dialect,
        network=network,
    )


def _text(text: str) -> ContextFile:
    return ContextFile(text.encode())


def image_files(plan: Plan, lock: LockLike, spec: Spec, address: str) -> dict[str, ContextFile]:
    """What stands beside the environment, in an image under /opt/envforge and in a venv build in its folder."""
    return {
        "bin/envforge-entrypoint": ContextFile((render.TEMPLATES / "image" / "entrypoint.sh").read_bytes(), True),
        "plan.json": _text(plan.dumps()),
        "pylock.toml": _text(lock.pylock),
        "requirements.txt": _text(lock.requirements),
        "verify.json": _text(render.as_json(verify_settings(spec))),
        "preflight.py": ContextFile((render.TEMPLATES / "image" / "preflight.py").read_bytes()),
        "preflight.json": _text(render.as_json(preflight_facts(plan, address))),
    }


def verify_settings(spec: Spec) -> dict[str, Any]:
    """The spec's wishes for the proof, as the defaults that `verify --settings` reads.

    Raises:
        DataError: one that the proof does not know; it would say so only after the build.
    """
    from envforge.verify.app import parser, setting_names

    known = setting_names(parser())
    if unknown := sorted(set(spec.verify.options) - known):
        near = difflib.get_close_matches(unknown[0], known, 1)
        raise DataError(
            f"verify.options of {spec.name}: the proof knows no {unknown[0]!r}"
            + (f"; did you mean {near[0]}?" if near else ""),
            "envforge verify --help names the options; write - as _",
        )
    found: dict[str, Any] = {
        **spec.verify.options,
        "stack": spec.verify.stack,
        "steps": spec.verify.steps,
        "max_length": spec.verify.max_length,
    }
    if spec.verify.prompt is not None:
        found["prompt"] = spec.verify.prompt
    if spec.remote_code is not None:
        # Only together with the revision that the spec pins: other code is not what was allowed.
        found["trust_remote_code"] = True
        found["revision"] = spec.remote_code
    return found


def site_files() -> dict[str, ContextFile]:
    """The proof as a package of its own for the environment's site-packages."""
    found = {"envforge/__init__.py": _text(_PACKAGE_INIT)}
    for path in verify_files():
        found[f"envforge/verify/{path.relative_to(VERIFY)}"] = ContextFile(path)
    return found


def _spec_files(spec: Spec) -> dict[str, Path]:
    folder = spec.folder or Path()
    found: dict[str, Path] = {}
    missing = []
    for target, source in spec.files.items():
        path = folder / source
        # A link out of the spec's folder would carry a file of the machine into the image unseen.
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            missing.append(f"files of {spec.name}: {source!r} (for {target}) is not a file beside its image.yaml")
        found[target] = path
    if missing:
        raise DataError("\n".join(missing), "add the files, or take the lines out of image.yaml")
    return found


def uv_binary() -> Path:
    """The uv program that is bound into build steps: that of this installation.

    Raises:
        OutsideError: it is not there.
    """
    try:
        from uv import find_uv_bin

        return Path(find_uv_bin())
    except (ImportError, FileNotFoundError) as error:
        found = shutil.which("uv")
        if found:
            return Path(found)
        raise OutsideError("the program uv is not there", "install it: python -m pip install uv", id="uv") from error


def find_wheels(requirements: Iterable[Requirement], folders: Iterable[Path]) -> dict[str, tuple[Path, ...]]:
    """Wheels and source archives of the lock that lie in local folders: by name, version and hash, so that a wrong
    file is never taken."""
    by_key: dict[tuple[str, str], list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*")):
            match = _WHEEL.match(path.name) or _SDIST.match(path.name)
            if match:
                by_key.setdefault((normalise(match["name"]), match["version"]), []).append(path)
    found: dict[str, tuple[Path, ...]] = {}
    for requirement in requirements:
        candidates = by_key.get((requirement.name, requirement.version), [])
        good = tuple(path for path in candidates if _sha256(path) in requirement.hashes)
        if good:
            found[requirement.name] = good[:1]
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _slow(path)


def _slow(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_context(context: BuildContext, folder: Path) -> None:
    """Lay the context out in an empty folder. Big files are linked where the file system allows, else copied.

    Raises:
        DiskFullError: no room.
        OutsideError: the folder cannot be written.
    """
    try:
        for name, file in sorted(context.files.items()):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(file.content, bytes):
                target.write_bytes(file.content)
            else:
                _place(file.content, target)
            target.chmod(0o755 if file.executable else 0o644)
        (folder / ".dockerignore").write_text("".join(f"/{name}\n" for name in context.ignored), encoding="utf-8")
    except OSError as error:
        if no_space(error):
            raise DiskFullError(
                f"no room for the build context in {folder}", "free some space and run again"
            ) from error
        raise OutsideError(f"cannot write the build context in {folder}: {error.strerror}") from error


def write_secrets(source: InstallSource, folder: Path) -> dict[str, Path]:
    """The secrets of a build as files that only we may read: id -> file. A builder mounts them, no layer holds them."""
    texts: dict[str, bytes] = {"uv.toml": source.uv_config.encode()}
    if source.ca is not None:
        # A copy, because a comma in its own path would be read as another field of a builder's option.
        texts["ca.pem"] = source.ca.read_bytes()
    if source.apt is not None:
        texts["apt.mirror"] = source.apt.encode()
    for name, text in texts.items():
        (folder / name).touch(0o600)
        (folder / name).write_bytes(text)
    return {name: folder / name for name in texts}


def _place(source: Path, target: Path) -> None:
    # A hard link shares its mode with the original, so only files that nobody minds are linked: big read-only wheels.
    if source.suffix == ".whl" and source.stat().st_mode & 0o777 == 0o644:
        try:
            os.link(source.resolve(), target)
            return
        except OSError:
            pass
    shutil.copyfile(source, target)
