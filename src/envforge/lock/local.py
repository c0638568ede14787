"""`name @ git+URL@COMMIT` and local paths: built into wheels beside the lock, so that they are hashed like the rest."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from envforge.errors import OutsideError, UsageError
from envforge.lock.formats import WHEELS, file_sha256
from envforge.lock.runner import explain_failure, run_uv
from envforge.lock.settings import PipSettings, index_arguments, redact, uv_environment

RECORD = "built.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Wheels must come out the same from the same sources, or every lock has another hash.
EPOCH = "315532800"  # 1980-01-01, the first day that a zip file can name


@dataclass(frozen=True, slots=True)
class LocalWheel:
    """A wheel that was built: `source` is the address without credentials, or the file name of a local path."""

    name: str
    version: str
    file: str
    sha256: str
    source: str


def build_local(
    requests: Iterable[str],
    lock_dir: Path,
    settings: PipSettings,
    *,
    python: str | Path | None = None,
    base: Path | None = None,
    uv: str | Path | None = None,
    timeout: float = 1800.0,
) -> tuple[LocalWheel, ...]:
    """Builds every request that is an address into lock_dir/wheels; other requests are passed over.

    Args:
        requests: PEP 508 lines. lock_dir: where the lock will be written.
        python: version or interpreter for builds; matters for compiled code only.
        base: the folder that relative paths start from; the current one unless given.
        timeout: seconds per build.

    Runs the build code of these packages. A commit that is in the folder already is not built again.

    Raises:
        UsageError: not a full commit, an address of another kind, or what is built has another name.
        OutsideError: git or the build fails. IndexUnreachableError: what the build needs cannot be had.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    wanted = []
    for line in requests:
        try:
            parsed = Requirement(line)
        except InvalidRequirement:
            continue
        if parsed.url:
            wanted.append((re.sub(r"[-_.]+", "-", parsed.name).lower(), parsed.url))
    if not wanted:
        return ()
    folder = (lock_dir / WHEELS).absolute()  # builds run elsewhere
    old = _read_record(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, url in wanted:
        known = next((wheel for wheel in old if wheel.name == name and wheel.source == redact(url)), None)
        if known is not None and url.startswith("git+") and _sha256(folder / known.file) == known.sha256:
            made.append(known)
            continue
        # Beside the target, so that the finished wheel is moved in one step.
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as work:
            built = _build(name, url, Path(work), settings, python, base or Path.cwd(), uv, timeout)
            wheel = _checked(name, url, built)
            built.replace(folder / built.name)
        made.append(wheel)
    _write_record(folder, old, made)
    return tuple(made)


def _build(
    name: str,
    url: str,
    work: Path,
    settings: PipSettings,
    python: str | Path | None,
    base: Path,
    uv: str | Path | None,
    timeout: float,
) -> Path:
    """-> the wheel, inside `work`."""
    epoch = EPOCH
    if url.startswith("git+"):
        source, epoch = _checkout(url, work / "source", timeout)
    else:
        source = _local_path(name, url, base)
    out = work / "out"
    out.mkdir()
    if source.suffix == ".whl":
        return Path(shutil.copy2(source, out / source.name))
    env = {**uv_environment(settings), "SOURCE_DATE_EPOCH": epoch}
    arguments = ["build", "--wheel", "--no-create-gitignore", "--color", "never", "--no-progress"]
    arguments += ["--python", str(python or sys.executable), *index_arguments(settings)]
    places = ["--out-dir", str(out), str(source)]
    result = run_uv([*arguments, *places], env=env, cwd=work, timeout=timeout, uv=uv)
    # A manager's stand-in (pyenv) may answer to the name without having that Python.
    missing = ("No interpreter found", "Failed to inspect Python interpreter")
    stand_in = result.code != 0 and any(words in result.words for words in missing)
    if stand_in:  # the plan's Python is not on this machine: another one will do, unless something is compiled
        arguments[arguments.index("--python") + 1] = sys.executable
        result = run_uv([*arguments, *places], env=env, cwd=work, timeout=timeout, uv=uv)
    if result.code != 0:
        error = explain_failure(result, settings)
        if isinstance(error, OutsideError):
            raise error
        raise OutsideError(f"{name} does not build: {error.cause}", "build it by hand to see more", id="build")
    wheels = sorted(out.glob("*.whl"))
    if len(wheels) != 1:
        raise OutsideError(f"the build of {name} made {len(wheels)} wheels", "build it by hand to see more", id="build")
    if stand_in and "-none-" not in wheels[0].name:
        raise OutsideError(
            f"{name} holds compiled code, and Python {python} is not on this machine to build it",
            f"install Python {python}, or give a ready wheel",
            id="build",
        )
    return wheels[0]


def _local_path(name: str, url: str, base: Path) -> Path:
    if url.startswith("file:"):
        path = Path(unquote(urlsplit(url).path))
    elif "://" in url:
        raise UsageError(
            f"{name} @ {redact(url)}: only git+URL@COMMIT and local paths can be locked",
            "download it, and give the file's path",
        )
    else:
        path = base / url
    path = path.resolve()
    if not path.exists():
        raise UsageError(f"{name} @ {url}: there is no {path}", "correct the path")
    if path.is_file() and not path.name.endswith((".whl", ".tar.gz", ".zip")):
        raise UsageError(f"{name} @ {url}: neither a folder, nor a wheel, nor a source archive", "correct the path")
    return path


def _checkout(url: str, target: Path, timeout: float) -> tuple[Path, str]:
    """-> the source folder at the commit, and the commit's time."""
    parts = urlsplit(url.removeprefix("git+"))
    path, at, commit = parts.path.rpartition("@")
    if not at or not _COMMIT.fullmatch(commit):
        raise UsageError(
            f"{redact(url)}: a lock needs the full commit, 40 hexadecimal digits after @",
            "git rev-parse BRANCH-OR-TAG prints it",
        )
    if parts.scheme not in {"https", "http", "ssh", "file"}:
        raise UsageError(f"{redact(url)}: git over {parts.scheme} is not supported", "use https, ssh or file")
    address = parts._replace(path=path, fragment="").geturl()
    subfolder = parse_qs(parts.fragment).get("subdirectory", [""])[0]
    target.mkdir()
    _git(["init", "--quiet"], target, timeout, url)
    # Written by hand, because an argument could be seen in the process list and the address may hold a password.
    with (target / ".git" / "config").open("a", encoding="utf-8") as file:
        file.write(f'[remote "origin"]\n\turl = {json.dumps(address)}\n\tfetch = +refs/*:refs/remotes/origin/*\n')
    _git(["fetch", "--quiet", "--tags", "origin"], target, timeout, url)
    _git(["checkout", "--quiet", "--detach", commit], target, timeout, url)
    _git(["submodule", "--quiet", "update", "--init", "--recursive"], target, timeout, url)
    when = _git(["show", "-s", "--format=%ct", commit], target, timeout, url).strip()
    source = (target / subfolder).resolve()
    if not source.is_relative_to(target.resolve()) or not source.is_dir():
        raise UsageError(f"{redact(url)}: the repository has no folder {subfolder!r}", "correct subdirectory=")
    return source, str(max(int(when), int(EPOCH)))


def _git(arguments: list[str], cwd: Path, timeout: float, url: str) -> str:
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:http:ssh:file", "LC_ALL": "C"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set inside git hooks
        env.pop(name, None)
    try:
        done = subprocess.run(
            ["git", "-c", "core.hooksPath=/dev/null", *arguments],
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise OutsideError("git is not there", "install git, or give a local path", id="git") from error
    except subprocess.TimeoutExpired as error:
        raise OutsideError(
            f"{redact(url)}: git did not finish within {timeout:.0f} s", "try again", id="git"
        ) from error
    if done.returncode != 0:
        words = redact(done.stderr.strip()).splitlines()
        raise OutsideError(
            f"{redact(url)}: git {arguments[0]} failed: {words[-1] if words else 'it said nothing'}",
            "check the address, the commit and your access to it",
            id="git",
        )
    return done.stdout


def _checked(name: str, url: str, built: Path) -> LocalWheel:
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        found, version, _, _ = parse_wheel_filename(built.name)
    except InvalidWheelFilename as error:
        raise UsageError(f"{name} @ {redact(url)}: {error}", "give a wheel with a proper file name") from error
    if found != name:
        raise UsageError(f"{name} @ {redact(url)} is the package {found}", f"ask for it as {found} @ ...")
    source = redact(url) if url.startswith("git+") else Path(url).name
    return LocalWheel(name, str(version), built.name, _sha256(built), source)


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError:
        return ""


def _read_record(folder: Path) -> list[LocalWheel]:
    try:
        return [LocalWheel(**row) for row in json.loads((folder / RECORD).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def _write_record(folder: Path, old: list[LocalWheel], made: list[LocalWheel]) -> None:
    """Also removes wheels that an earlier record names and this one does not."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{RECORD}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump([asdict(wheel) for wheel in sorted(made, key=lambda wheel: wheel.name)], file, indent=1)
        file.write("\n")
    Path(name).replace(folder / RECORD)
    for stale in {wheel.file for wheel in old} - {wheel.file for wheel in made}:
        (folder / stale).unlink(missing_ok=True)
