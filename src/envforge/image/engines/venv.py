"""The environment folder for machines without a container engine: same lock, same entrypoint, same proof.

    DIR/env/                  the environment; env/envforge.json says what it is and that it is whole
    DIR/bin/envforge-entrypoint, plan.json, pylock.toml, requirements.txt, verify.json, cache/, receipts/

The environment is built beside its place and renamed into it, so a killed build never looks like a finished one.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from envforge.errors import EngineError, OutsideError, UsageError
from envforge.files import check_lock_place, told
from envforge.image.context import uv_binary, write_context
from envforge.image.engines import EngineStatus, ImageInfo, Mount, RunResult
from envforge.image.engines.process import stream
from envforge.image.failures import explain
from envforge.image.values import LABEL_ADDRESS, BaseInfo, BuildContext, Event, Progress, silent

MARKER = "envforge.json"
# What a sealed run may see of the caller's environment: locale, time, scratch space, devices, thread counts, the hub.
_PASSED = ("LANG", "LC_ALL", "TZ", "TMPDIR", "HOME", "USER", "LOGNAME", "TERM", "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT")
_PASSED_PREFIXES = ("NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "CUDA_DEVICE_", "HF_HUB_")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE")


class VenvEngine:
    """Builds into one folder of this machine, `output`."""

    name = "venv"

    def __init__(self, output: Path | None = None) -> None:
        self.output = output.absolute() if output is not None else None

    @property
    def folder(self) -> Path:
        """Where the environment stands.

        Raises:
            UsageError: no folder was named.
        """
        if self.output is None:
            raise UsageError("the venv engine needs a folder to build in", "name one: --output DIR")
        return self.output

    def check_folder(self) -> None:
        """Before anything is done.

        Raises:
            UsageError: the folder holds an environment or a requirements.txt that is not ours.
        """
        env = self.folder / "env"
        if (env / MARKER).is_file() or (self.folder / "bin" / "envforge-entrypoint").is_file():
            return  # ours, whole or damaged
        if env.is_symlink() or env.is_file() or (env.is_dir() and any(env.iterdir())):
            raise UsageError(
                f"{env} was not made by envforge, and would be replaced", "move it away, or name another --output DIR"
            )
        check_lock_place(self.folder)

    def available(self) -> EngineStatus:
        try:
            return EngineStatus(True, _ask([str(uv_binary()), "--version"]).split()[-1])
        except (OutsideError, EngineError, IndexError) as error:
            return EngineStatus(False, reason=f"the venv engine cannot work: {error}", hint="install uv")

    def base(self, ref: str, python: str, progress: Progress = silent) -> BaseInfo:
        """The interpreter of this machine. `ref` may name one by path; empty means: look for it."""
        command = [
            str(uv_binary()),
            "python",
            "find",
            "--no-config",
            "--no-project",
            "--system",
            "--no-python-downloads",
        ]
        try:
            found = _ask([*command, ref or python]).strip()
        except EngineError as error:
            if ref:
                raise EngineError(f"{ref} is no Python that runs here", "correct --base", id="no-python") from error
            raise EngineError(
                f"no Python {python} is on this machine, and the plan is for that version",
                f"install python{python} (with its venv module), name an interpreter with --base PATH, "
                "or plan for another version with --python",
                id="no-python",
            ) from error
        facts = _ask(
            [found, "-I", "-c", "import sys, sysconfig; print(sys.version_info[:3], sysconfig.get_platform())"]
        )
        version = ".".join(facts[1 : facts.index(")")].split(", "))
        if version.rpartition(".")[0] != python:
            raise EngineError(
                f"{found} is Python {version}, and the plan is for Python {python}",
                "name another interpreter with --base PATH, or plan for another version with --python",
                id="no-python",
            )
        real = Path(found).resolve()
        return BaseInfo(ref=found, digest=f"{version} {real}", python=found, os=platform.system(), pythons=(python,))

    def pythons(self) -> tuple[str, ...]:
        """The Python versions ("3.11") that this machine has interpreters of."""
        words = [
            "python",
            "list",
            "--no-config",
            "--only-installed",
            "--no-python-downloads",
            "--output-format",
            "json",
        ]
        rows = json.loads(_ask([str(uv_binary()), *words]))
        found = {(int(row["version_parts"]["major"]), int(row["version_parts"]["minor"])) for row in rows}
        return tuple(f"{major}.{minor}" for major, minor in sorted(found))

    def find(self, label: str, value: str) -> tuple[ImageInfo, ...]:
        info = self.inspect(str(self.folder))
        return (info,) if info is not None and info.labels.get(label) == value else ()

    def inspect(self, reference: str) -> ImageInfo | None:
        folder = Path(reference)
        try:
            marker = json.loads((folder / "env" / MARKER).read_text(encoding="utf-8"))
            labels, size = dict(marker["labels"]), int(marker["size"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # The environment may have been touched by hand since: what has no interpreter is not an environment.
        if not (folder / "env" / "bin" / "python").exists():
            return None
        return ImageInfo(f"venv:{labels.get(LABEL_ADDRESS, '')}", (str(folder),), labels, size)

    def build(self, context: BuildContext, log: Path, progress: Progress = silent) -> ImageInfo:
        from filelock import FileLock

        folder = self.folder
        self.check_folder()
        with told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / ".envforge.lock")
        with lock, told(folder):
            for left in (*folder.glob(".env.building-*"), *folder.glob(".env.old-*")):
                # We hold the lock, so whoever made these is gone.
                shutil.rmtree(left, ignore_errors=True)
            fresh = Path(tempfile.mkdtemp(prefix=".env.building-", dir=folder))
            try:
                self._make(context, fresh, log, progress)
                self._swap(fresh)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
            self._place(context)
        info = self.inspect(str(folder))
        if info is None:
            raise EngineError(f"the environment in {folder} was removed while it was being finished", "build again")
        return info

    def _make(self, context: BuildContext, fresh: Path, log: Path, progress: Progress) -> None:
        env_folder = fresh / "env"
        uv = str(uv_binary())
        with tempfile.TemporaryDirectory(prefix="envforge-context-") as scratch:
            parts = Path(scratch)
            write_context(context, parts)
            environment = _install_environment(context)
            progress(Event("stage", "making the environment"))
            make = [uv, "venv", "--no-config", "--no-project", "--relocatable", "--python", str(context.base.python)]
            self._step([*make, str(env_folder)], environment, log, progress)
            for part in ("torch", "stack", "compile"):
                requirements = parts / "build" / "parts" / part / "requirements.txt"
                if not requirements.is_file() or not requirements.read_text(encoding="utf-8").strip():
                    continue
                progress(Event("stage", f"installing {part}" if part != "compile" else "compiling"))
                wheels = parts / "build" / "parts" / part / "wheels"
                install = [uv, "pip", "install", "--no-config", "--python", str(env_folder / "bin" / "python")]
                install += [*context.source.arguments, "--no-deps", "--require-hashes"]
                if "--index-strategy" not in context.source.arguments:
                    install += ["--index-strategy", "unsafe-best-match"]
                argv = [*install, "--find-links", str(wheels), "--requirements", str(requirements)]
                if part != "compile":
                    self._step([*argv, "--only-binary", ":all:"], environment, log, progress)
                    continue
                # What the build code imports stands beside the environment, which it must see, and not in it.
                tools = parts / "tools"
                argv_tools = [*install, "--target", str(tools), "--only-binary", ":all:"]
                argv_tools += ["--requirements", str(parts / "build" / "scripts" / "tools.txt")]
                self._step(argv_tools, environment, log, progress)
                path = os.pathsep.join((str(tools / "bin"), str(env_folder / "bin"), environment.get("PATH", "")))
                compiling = {**environment, "PYTHONPATH": str(tools), "PATH": path}
                self._step([*argv, "--no-build-isolation"], compiling, log, progress)
        site = env_folder / "lib" / f"python{context.python}" / "site-packages"
        for name, file in context.files.items():
            if name.startswith("site/"):
                target = site / name.removeprefix("site/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.content if isinstance(file.content, bytes) else file.content.read_bytes())
        # The marker comes last: without it the folder is not an environment.
        marker = {"schema": 1, "labels": context.labels, "size": _size(env_folder)}
        (env_folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")

    @staticmethod
    def _step(argv: list[str], environment: dict[str, str], log: Path, progress: Progress) -> None:
        try:
            done = stream(argv, env=environment, on_line=lambda line: progress(Event("line", line)), log=log)
        except OSError as error:
            raise EngineError(f"{argv[0]} could not be started: {error.strerror}") from error
        if done.code != 0:
            raise explain(done.tail, log)

    def _swap(self, fresh: Path) -> None:
        place = self.folder / "env"
        old = self.folder / f".env.old-{os.getpid()}"
        if place.exists() or place.is_symlink():
            place.rename(old)
        try:
            (fresh / "env").rename(place)
        except BaseException:
            if old.exists():
                old.rename(place)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _place(self, context: BuildContext) -> None:
        """The small files beside the environment, each replaced in one go."""
        folder = self.folder
        for sub in ("bin", "cache", "receipts"):
            (folder / sub).mkdir(exist_ok=True)
        for name, file in context.files.items():
            if name.startswith("image/"):
                target = folder / name.removeprefix("image/")
                content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
                _replace(target, content, 0o755 if file.executable else 0o644)

    def tag(self, image: ImageInfo, reference: str) -> ImageInfo:
        return image  # a folder has its name

    def run(
        self,
        reference: str,
        argv: list[str],
        *,
        mounts: tuple[Mount, ...] = (),
        network: str = "none",
        user: str | None = None,
        env: dict[str, str] | None = None,
        fetch: str | None = None,
        gpus: bool = False,
        progress: Progress = silent,
    ) -> RunResult:
        """Runs through the entrypoint. Nothing is mounted and no network is cut: paths are this machine's own."""
        lines: list[str] = []

        def on_line(line: str) -> None:
            lines.append(line)
            progress(Event("line", line))

        environment = {**sealed_environment(), **(env or {})}
        try:
            done = stream(
                [str(Path(reference) / "bin" / "envforge-entrypoint"), *argv], env=environment, on_line=on_line
            )
        except OSError as error:
            raise EngineError(f"the entrypoint of {reference} could not be started: {error.strerror}") from error
        fetched = None
        if fetch is not None and Path(fetch).is_file():
            fetched = Path(fetch).read_bytes()
        return RunResult(done.code, "\n".join(lines), fetched, tuple(argv))

    def free_space(self) -> int | None:
        """Bytes free where the environment will stand."""
        place = self.folder
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def gpus(self) -> bool:
        return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def sealed_environment() -> dict[str, str]:
    """The caller's environment without anything that could reach into ours (PYTHON*, LD_*, CONDA_*, ...)."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED or name in _PROXIES or name.startswith(_PASSED_PREFIXES)
    }
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **kept, "PYTHONNOUSERSITE": "1"}


def _install_environment(context: BuildContext) -> dict[str, str]:
    told = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    found = {**(context.source.environment or told), "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    found.pop("VIRTUAL_ENV", None)
    if context.source.ca is not None:
        found["SSL_CERT_FILE"] = str(context.source.ca)
    return found


def _ask(argv: list[str]) -> str:
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{argv[0]} does not answer: {error}") from error
    if answer.returncode != 0:
        said = answer.stderr.strip().removeprefix("error: ") or f"{argv[0]} failed"
        # Of uv's own needs only one can fail here, and then no Python is to blame.
        if "Failed to initialize cache" in said:
            raise OutsideError(
                f"uv cannot keep its cache: {said}", "set XDG_CACHE_HOME to a folder that can be written"
            )
        raise EngineError(said)
    return answer.stdout


def _replace(target: Path, content: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream_:
            stream_.write(content)
        Path(name).chmod(mode)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += (Path(root) / name).lstat().st_size
    return total
