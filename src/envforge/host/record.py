"""Record folders: what a probe saw on a machine, one small text file per question.

A folder is written by `envforge detect --record`, by the shell probe on a node without Python, or by hand.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import unicodedata
from pathlib import Path

from envforge.errors import OutsideError, UsageError
from envforge.host.facts import Record

# The files of the public format, then what our own probes add to them.
FILES = (
    "nvidia-smi.txt",
    "nvidia-smi.rc",
    "nvidia-smi-query.csv",
    "proc_driver_nvidia_version",
    "sys_module_nvidia_version",
    "proc_version",
    "os-release",
    "glibc",
    "arch",
    "lspci.txt",
    "env",
    "nvml.json",
    "nvml.rc",
    "nvidia-smi-L.txt",
    "nv_tegra_release",
    "dev_nvidia",
    "container",
    "engine",
    "python",
    "meminfo",
)
# Nothing else of an environment is recorded: a record is sent around, and variables hold secrets.
ENV_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "ENVFORGE_DRIVER",
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_GPUS",
    "SLURM_STEP_GPUS",
    "SLURM_GPUS_ON_NODE",
    "WSL_DISTRO_NAME",
)
MAX_BYTES = 1_000_000
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_PLAIN = re.compile(r"[\n\t\x20-\x7e]*")
_HINT = "make one with: envforge detect --record DIR, or with the shell probe that envforge detect --script prints"


def clean(text: str) -> str:
    """Text fit for parsing: no colours, no control characters, line ends as \\n, decimal digits as ASCII."""
    text = _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ")
    if _PLAIN.fullmatch(text):
        return text
    out = []
    for char in text:
        if char in "\n\t" or ("\x20" <= char <= "\x7e"):
            out.append(char)
        elif char.isdecimal():
            out.append(str(unicodedata.decimal(char)))
        elif unicodedata.category(char) not in ("Cc", "Cf", "Cs"):
            out.append(char)
    return "".join(out)


def decode(raw: bytes) -> str:
    """Bytes of a record file as text: UTF-8, or UTF-16 where a byte order mark says so (a Windows shell wrote it)."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return raw.decode("utf-16", "replace")
    return raw.decode("utf-8-sig", "replace")


def read_record(folder: Path) -> dict[str, str]:
    """The files of a record folder that are there; other files are ignored.

    Raises:
        UsageError: no such folder, not a folder, unreadable, or without a single record file.
    """
    try:
        present = {entry.name: entry for entry in folder.iterdir()}
    except FileNotFoundError as error:
        raise UsageError(f"{folder}: no such record folder", _HINT) from error
    except NotADirectoryError as error:
        raise UsageError(f"{folder} is a file, not a record folder", _HINT) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: the record folder cannot be read ({_why(error)})", _HINT) from error
    record = {}
    for name in FILES:
        try:
            # Never a pipe or a device, which could make us wait for ever.
            if name in present and present[name].is_file():
                with present[name].open("rb") as file:
                    record[name] = decode(file.read(MAX_BYTES))
        except OSError as error:
            raise UsageError(f"{present[name]}: cannot be read ({_why(error)})", _HINT) from error
    if not record:
        raise UsageError(f"{folder} holds no record file (such as {FILES[0]} or {FILES[3]})", _HINT)
    return record


def check_new_folder(folder: Path) -> None:
    """Refuse a place where `write_record` could not write, before any probing.

    Raises:
        UsageError: the folder exists and is not empty, is a file, or its parent does not exist.
    """
    try:
        if folder.is_dir():
            if any(folder.iterdir()):
                raise UsageError(
                    f"{folder} exists and is not empty", "give a new folder, or remove the old record first"
                )
        elif folder.exists() or folder.is_symlink():
            raise UsageError(f"{folder} exists and is not a folder", "give a new folder for the record")
        elif not folder.absolute().parent.is_dir():
            raise UsageError(f"{folder.absolute().parent}: no such folder", "make the parent folder first")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{str(folder)!r}: cannot be used ({_why(error)})", "give a new folder for the record"
        ) from error


def write_record(record: Record, folder: Path) -> None:
    """Write a record folder, all of it or nothing.

    Raises:
        UsageError: the place is taken (see `check_new_folder`).
        OutsideError: it cannot be written (permission, disk full).
    """
    check_new_folder(folder)
    staging: Path | None = None
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
        for name in FILES:
            if name in record:
                (staging / name).write_text(record[name], encoding="utf-8", errors="replace")
        staging.chmod(0o755)
        os.replace(staging, folder)  # noqa: PTH105 - onto an empty folder, which Path.replace documents less clearly
        staging = None
    except OSError as error:
        raise OutsideError(f"{folder}: the record cannot be written ({_why(error)})", "choose another place") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
