"""Fresh CPU environments that cost seconds: made by uv, files hard-linked from its cache, removed afterwards.

Packages come from where the user's pip is told to look (index, find-links, certificate). torch is asked for as
`+cpu`, so that no CUDA build of several gigabytes can come in.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from envforge.lock import find_uv, index_arguments, read_pip_settings
from envforge.lock.settings import uv_environment

CHECK = Path(__file__).resolve().with_name("tiny_check.py")
TORCH = "torch==2.13.0+cpu"


@dataclass(frozen=True)
class Ran:
    """One finished child. `words`: the last line that says something, without colours and addresses."""

    code: int
    output: str
    words: str
    seconds: float

    @property
    def ok(self) -> bool:
        """It ended with 0."""
        return self.code == 0


@dataclass(frozen=True)
class Checked:
    """What tiny_check said: `error` is empty when everything worked."""

    ok: bool
    error: str
    versions: dict[str, str] = field(default_factory=dict)


def child(command: Sequence[str], *, env: dict[str, str], cwd: Path, timeout: float) -> Ran:
    """Runs a command in its own process group; whatever it started ends with it."""
    started = time.monotonic()
    process = subprocess.Popen(
        command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        output, errors, code = "", f"no end within {timeout:.0f} s", 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return Ran(code, output, tidy(errors), time.monotonic() - started)


def tidy(text: str) -> str:
    """uv's or Python's words without colours, addresses and paths."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    text = re.sub(r"(?:file|https?)://[^\s`'\")]+", "<address>", text)
    return re.sub(r"/(?:[\w.+-]+/)+([\w.+-]+)", r"\1", text).strip()


def uv(arguments: Sequence[str], folder: Path, timeout: float = 600.0) -> Ran:
    """One uv call with the user's package sources."""
    env = uv_environment(read_pip_settings())
    env |= {"UV_LINK_MODE": "hardlink", "DS_BUILD_OPS": "0"}
    return child([find_uv(), *arguments], env=env, cwd=folder, timeout=timeout)


def end_cleanly() -> None:
    """A SIGTERM ends this program like Ctrl-C: its children end and its folders go with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def fresh(python: str = "3.11") -> Iterator[Environment]:
    """An empty environment in a temporary folder, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="cpu-env-") as name:
        folder = Path(name)
        made = uv(["venv", "--python", python, "--no-project", "--quiet", "env"], folder)
        if not made.ok:
            raise RuntimeError(f"no environment for Python {python}: {made.words}")
        yield Environment(folder)


@dataclass(frozen=True)
class Environment:
    """A folder with a virtual environment `env` in it."""

    folder: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "env" / "bin" / "python")

    def install(self, arguments: Sequence[str], timeout: float = 600.0) -> Ran:
        """`uv pip install` with these arguments and the user's package sources."""
        command = ["pip", "install", "--python", self.python, "--color", "never", "--no-progress"]
        return uv([*command, *index_arguments(read_pip_settings()), *arguments], self.folder, timeout)

    def complaints(self) -> list[str]:
        """What the installed packages' own metadata has against what is installed (`uv pip check`)."""
        ran = uv(["pip", "check", "--python", self.python, "--color", "never"], self.folder)
        text = " ".join(ran.words.split())
        found = re.findall(r"The package `(\S+)` requires `([^`]+)`, but `([^`]+)` is installed", text)
        return sorted(f"{who} requires {what}; {have} is installed" for who, what, have in found)

    def check(self, step: str, imports: Sequence[str], timeout: float = 420.0) -> Checked:
        """tiny_check in this environment."""
        self._compiled(save=False)
        keep = ("PATH", "LANG", "SSL_CERT_FILE")
        env = {name: os.environ[name] for name in keep if name in os.environ} | {
            "HOME": str(self.folder), "HF_HOME": str(self.folder / "hf"), "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONNOUSERSITE": "1", "WANDB_MODE": "disabled",
            "WANDB_DISABLED": "true", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "", "DO_NOT_TRACK": "1",
        }  # fmt: skip
        ran = child([self.python, str(CHECK), step, *imports], env=env, cwd=self.folder, timeout=timeout)
        self._compiled(save=True)
        line = ran.output.strip().rpartition("\n")[2]
        try:
            said = json.loads(line)
            return Checked(bool(said["ok"]), str(said["error"]), dict(said["versions"]))
        except (ValueError, KeyError, TypeError):
            last = ran.words.rpartition("\n")[2][:240]
            return Checked(False, f"the check ended with {ran.code}: {last}")

    def _compiled(self, save: bool) -> None:
        """Compiled modules, kept by distribution and version between environments: compiling costs more than the check.

        A compiled module is only taken by Python while its source has the size and time it was made from, and uv links
        the same files into every environment.
        """
        site = next((self.folder / "env" / "lib").glob("python*/site-packages"))
        tag = f"cpython-{site.parent.name.removeprefix('python').replace('.', '')}"
        store = Path(tempfile.gettempdir()) / f"cpu-env-compiled-{os.getuid()}" / tag
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        for record in site.glob("*.dist-info/RECORD"):
            kept = store / record.parent.name
            for line in record.read_text(encoding="utf-8").splitlines():
                name = line.partition(",")[0]
                if name.startswith(("..", "/", '"')) or not name.endswith(".py"):
                    continue
                path = Path(name).parent / "__pycache__" / f"{Path(name).stem}.{tag}.pyc"
                source, target = (site / path, kept / path) if save else (kept / path, site / path)
                if not source.exists() or target.exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):  # another run was quicker
                    os.link(source, target)


def here(python: str = "3.11") -> str:
    """The environment in words, for records."""
    glibc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    return f"python {python}, {TORCH.replace('==', ' ').replace('+cpu', ' CPU wheel')}, no GPU, {glibc}".rstrip(", ")


__all__ = ["TORCH", "Checked", "Environment", "Ran", "child", "end_cleanly", "fresh", "here", "tidy", "uv"]
