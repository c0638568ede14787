"""The lock: a plan's whole closure with hashes, made by uv.

`read_pip_settings` -> `probe_availability` -> (the resolver) -> `build_local` -> `make_lock` -> `write_lock` ->
`install_command`.
"""

from __future__ import annotations

from envforge.files import REQUIREMENTS
from envforge.lock.availability import (
    AS_TORCH,
    Availability,
    Build,
    Pages,
    Place,
    allowed_torch,
    default_variants,
    find_builds,
    from_json,
    probe_availability,
)
from envforge.lock.formats import PYLOCK, WHEELS, IndexKind, Lock, LockedPackage, read_requirements
from envforge.lock.install import install_command, install_options, source_packages, write_lock
from envforge.lock.local import LocalWheel, build_local
from envforge.lock.make import LockConflict, make_lock
from envforge.lock.runner import UvResult, explain_failure, find_uv, python_platform, run_uv
from envforge.lock.settings import (
    PipSettings,
    index_arguments,
    index_environment,
    read_constraints,
    read_pip_settings,
    redact,
)

__all__ = [
    "AS_TORCH",
    "PYLOCK",
    "REQUIREMENTS",
    "WHEELS",
    "Availability",
    "Build",
    "IndexKind",
    "LocalWheel",
    "Lock",
    "LockConflict",
    "LockedPackage",
    "Pages",
    "PipSettings",
    "Place",
    "UvResult",
    "allowed_torch",
    "build_local",
    "default_variants",
    "explain_failure",
    "find_builds",
    "find_uv",
    "from_json",
    "index_arguments",
    "index_environment",
    "install_command",
    "install_options",
    "make_lock",
    "probe_availability",
    "python_platform",
    "read_constraints",
    "read_pip_settings",
    "read_requirements",
    "redact",
    "run_uv",
    "source_packages",
    "write_lock",
]
