"""Plan, lock and spec -> the text of a Dockerfile. Pure: no engine, no clock, nothing but arguments and templates."""

from __future__ import annotations

import base64
import datetime
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge import texts
from envforge.errors import DataError
from envforge.image import quote
from envforge.image.split import parse_lock
from envforge.image.values import (
    LABEL_ADDRESS,
    LABEL_DRIVER_FLOOR,
    LABEL_LOCK_HASH,
    LABEL_PLAN,
    LABEL_PLAN_HASH,
    LABEL_PYTHON,
    LABEL_SM,
    LABEL_STACK,
    LABEL_TORCH,
    LABEL_VARIANT,
    BaseInfo,
    Dialect,
    LockLike,
)
from envforge.resolver.plan import Plan

if TYPE_CHECKING:
    from jinja2 import Environment

    from envforge.spec import Spec

TEMPLATES = Path(__file__).parent.parent / "templates"
ENV_PREFIX = "/opt/envforge/env"
CACHE = "/opt/envforge/cache"
_SCRIPTS = "/run/envforge/scripts"
_PARTS = "/run/envforge/parts"
_LONG_LABEL = 4096  # beyond this the plan is compressed: some registries cap the size of an image's configuration
_PACKED = "zlib+base64:"

# The seal: the same for every image. Nothing sets LD_LIBRARY_PATH: torch finds its own libraries through their RPATH,
# and a toolkit's folder on that path shadows them.
SEALED: tuple[tuple[str, str], ...] = (
    ("PATH", f"{ENV_PREFIX}/bin:/opt/envforge/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("VIRTUAL_ENV", ENV_PREFIX),
    ("PYTHONNOUSERSITE", "1"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("PYTHONUNBUFFERED", "1"),
    ("LANG", "C.UTF-8"),
    ("HF_HOME", f"{CACHE}/hf"),
    ("TRITON_CACHE_DIR", f"{CACHE}/triton"),
    ("TORCHINDUCTOR_CACHE_DIR", f"{CACHE}/inductor"),
    ("MPLCONFIGDIR", f"{CACHE}/mpl"),
    ("CUDA_CACHE_PATH", f"{CACHE}/cuda"),
    ("XDG_CACHE_HOME", f"{CACHE}/xdg"),
    ("NVIDIA_VISIBLE_DEVICES", "all"),
    ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
)
_RESERVED = frozenset(
    {"PATH", "VIRTUAL_ENV", "PYTHONNOUSERSITE", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES"}
)
# Verbs user libraries: without them NCCL falls back from InfiniBand or RoCE to TCP without a word.
_RDMA = ("ibverbs-providers", "libibverbs1", "librdmacm1")
_COMPILER = ("gcc", "libc6-dev")


@dataclass(frozen=True, slots=True)
class Compile:
    """The stage that compiles what has no wheel: its base (a CUDA toolkit of torch's major), architectures, jobs."""

    base: str
    arch_list: str
    max_jobs: int
    packages: tuple[str, ...] = ("g++", "gcc", "git", "make", "ninja-build")


def needs_compiler(plan: Plan, lock: LockLike) -> bool:
    """Triton calls the C compiler when its first kernel runs: a GPU image that holds Triton needs gcc."""
    if plan.variant == "cpu":
        return False
    names = {requirement.name for requirement in parse_lock(lock.requirements)}
    return bool(names & {"triton", "pytorch-triton", "unsloth"})


def may_compile(plan: Plan, spec: Spec) -> bool:
    """Whether something in the image may compile against torch's headers: on a GPU always (Triton, cpp_extension,
    NVRTC), on a CPU only with a compiler that the spec adds."""
    compilers = re.compile(r"(gcc|g\+\+|clang|build-essential|cuda-nvcc)([-=].*)?")
    return plan.variant != "cpu" or any(compilers.fullmatch(name) for name in spec.system_packages)


def needs_toolkit(plan: Plan) -> bool:
    """deepspeed compiles its kernels while it runs, so nvcc of torch's CUDA major must be in the image."""
    return plan.cuda is not None and "deepspeed" in plan.pins


def toolkit_env(plan: Plan) -> tuple[tuple[str, str], ...]:
    """What an image on a CUDA base needs besides: where nvcc is, and a driver requirement that torch's CUDA really has.

    CUDA images ask for the driver of their own minor, and containers of theirs do not start below it; what runs here
    is torch, whose family needs its major only.
    """
    if not needs_toolkit(plan):
        return ()
    major = (plan.cuda or "").split(".")[0]
    return (("CUDA_HOME", "/usr/local/cuda"), ("NVIDIA_REQUIRE_CUDA", f"cuda>={major}.0"))


def system_packages(plan: Plan, lock: LockLike) -> tuple[str, ...]:
    """Debian packages that the plan itself needs, sorted; those of the spec come later and apart."""
    wanted: set[str] = set()
    if needs_compiler(plan, lock):
        wanted.update(_COMPILER)
    if plan.variant != "cpu":
        wanted.update(_RDMA)
    return tuple(sorted(wanted))


def system_arguments(plan: Plan, lock: LockLike, base: BaseInfo) -> list[str]:
    """What system.sh is told for the plan itself: flags for the interpreter and its headers, then the packages."""
    flags = ["--python", plan.python] if base.install_python else []
    if needs_compiler(plan, lock):
        flags += ["--headers", plan.python]
    return [*flags, *system_packages(plan, lock)]


def _with_versions(
    own: list[str], user: tuple[str, ...], system: Mapping[str, str] | None
) -> tuple[list[str], list[str]]:
    """The arguments for the plan's packages and those for the spec's, exact where the versions are known."""
    names = [quote.debian_package(word) for word in user]
    if not system:
        return own, names
    asked = {name.split("=")[0] for name in names} - set(own)
    exact = [f"{name}={version}" for name, version in sorted(system.items())]
    return (
        [quote.debian_package(word) for word in exact if word.split("=")[0] not in asked],
        [quote.debian_package(word) for word in exact if word.split("=")[0] in asked],
    )


def pack_plan(plan: Plan) -> str:
    """The plan as a label: compact canonical JSON, compressed where long."""
    text = json.dumps(plan.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    if len(text) <= _LONG_LABEL:
        return text
    return _PACKED + base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack_plan(label: str) -> str:
    """The JSON text behind a plan label.

    Raises:
        DataError: not what `pack_plan` makes.
    """
    if not label.startswith(_PACKED):
        return label
    try:
        return zlib.decompress(base64.b64decode(label[len(_PACKED) :], validate=True)).decode()
    except (ValueError, zlib.error) as error:
        raise DataError(f"the image's plan label is damaged ({error})", "build the image again") from error


def labels(plan: Plan, lock: LockLike, spec: Spec, base: BaseInfo, address: str, epoch: int | None) -> dict[str, str]:
    """The OCI labels, in the order in which they are written."""
    found = {
        "org.opencontainers.image.title": spec.name,
        "org.opencontainers.image.base.name": base.ref,
        LABEL_STACK: spec.name,
        LABEL_PYTHON: plan.python,
        LABEL_TORCH: torch_version(plan, lock),
        LABEL_VARIANT: plan.variant,
        LABEL_SM: ",".join(plan.target.sm),
        LABEL_DRIVER_FLOOR: plan.target.driver_floor or "",
        LABEL_LOCK_HASH: lock.hash,
        LABEL_PLAN_HASH: plan.hash(),
        LABEL_PLAN: pack_plan(plan),
        LABEL_ADDRESS: address,
    }
    if base.digest:
        found["org.opencontainers.image.base.digest"] = base.digest
    if epoch is not None:
        moment = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc)
        found["org.opencontainers.image.created"] = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
    return found


def torch_version(plan: Plan, lock: LockLike) -> str:
    """torch as locked, with its local part ("2.6.0+cu126"); the plan's pin where the lock has none."""
    locked = next((r.version for r in parse_lock(lock.requirements) if r.name == "torch"), None)
    return locked or plan.pins.get("torch", "none")


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The template of Dockerfiles."""
    return texts.environment(TEMPLATES, quoted=quote.quoted, path=quote.path)


def render_dockerfile(
    plan: Plan,
    lock: LockLike,
    spec: Spec,
    base: BaseInfo,
    image_labels: dict[str, str],
    *,
    dialect: Dialect = "buildkit",
    compile_stage: Compile | None = None,
    system: Mapping[str, str] | None = None,
    debs: bool = False,
    apt: bool = False,
) -> str:
    """The Dockerfile of one plan.

    system: exact versions of system packages. debs: they lie in the context. apt: a mirror of their archive is set.

    `buildkit` installs straight into the runtime stage through mounts, so that nothing but the result is in a layer;
    `plain` has no mounts and builds in a stage of its own.

    Raises:
        DataError: a value that the Dockerfile cannot carry, with the value named.
    """
    own_system, user_system = _with_versions(system_arguments(plan, lock, base), spec.system_packages, system)
    values: dict[str, Any] = {
        "title": spec.name,
        "python": plan.python,
        "torch": torch_version(plan, lock),
        "variant": plan.variant,
        "buildkit": dialect == "buildkit",
        "base": quote.reference(base.ref),
        "sealed": (*SEALED, *toolkit_env(plan)),
        "system": own_system,
        "user_system": user_system,
        "apt": apt,
        "compile": compile_stage,
        "headers": "keep-headers" if may_compile(plan, spec) else "no-headers",
        "scripts": _SCRIPTS,
        "parts": _PARTS,
        "site": f"{ENV_PREFIX}/lib/python{plan.python}/site-packages/",
        "files": [(f"files/{i:04d}", _target(target)) for i, target in enumerate(sorted(spec.files))],
        "env": [(quote.env_name(name), value) for name, value in sorted(_checked_env(spec.env).items())],
        "labels": list(image_labels.items()),
        "run": _Run(dialect, debs),
    }
    text = environment().get_template("Dockerfile.j2").render(values)
    return "\n".join(_squeeze(text.removesuffix("\n").split("\n"))) + "\n"


def _checked_env(env: dict[str, str]) -> dict[str, str]:
    taken = sorted(_RESERVED & set(env))
    if taken:
        raise DataError(
            f"env of the spec sets {', '.join(taken)}, which the image keeps for its seal",
            "remove it; libraries and folders come from the environment itself",
        )
    return env


def _target(path: str) -> str:
    parts = Path(path).parts
    if not path.startswith("/") or ".." in parts or path.endswith("/"):
        raise DataError(f"files of the spec: {path!r} is not an absolute file path in the image")
    if parts[1:2] in (("proc",), ("sys",), ("dev",), ("run",)) or path.startswith(ENV_PREFIX + "/"):
        raise DataError(f"files of the spec: {path!r} lies where the image's own or the kernel's files are")
    return path


def _squeeze(lines: list[str]) -> list[str]:
    """No two empty lines in a row."""
    return [line for i, line in enumerate(lines) if line.strip() or (i and lines[i - 1].strip())]


class _Run:
    """`run(argv, use...)` of the template: one RUN in exec form with the mounts that the step uses."""

    def __init__(self, dialect: Dialect, debs: bool = False) -> None:
        self.buildkit = dialect == "buildkit"
        self.debs = debs

    def __call__(self, values: list[str], *uses: str) -> str:
        line = quote.argv([str(value) for value in values])
        if not self.buildkit:
            # What a mount would show is copied just before its use: a change in one part redoes that part only.
            parts = [use for use in uses if use in ("torch", "stack", "compile")]
            copies = [f'COPY ["build/parts/{part}/", "{_PARTS}/{part}/"]\n' for part in parts]
            return "".join(copies) + f"RUN {line}"
        mounts = [f"type=bind,source=build/scripts,target={_SCRIPTS}"]
        for use in uses:
            mounts += self._mounts(use)
        flags = "".join(f"--mount={mount} \\\n    " for mount in mounts)
        return f"RUN {flags}{line}"

    def _mounts(self, use: str) -> list[str]:
        debs = ["type=bind,source=build/debs,target=/run/envforge/debs"] if self.debs else []
        table: dict[str, list[str]] = {
            "uv": ["type=bind,source=build/uv,target=/run/envforge/uv"],
            "index": [
                "type=secret,id=uv.toml",
                "type=secret,id=ca.pem",
                "type=cache,id=envforge-uv,target=/run/envforge/cache",
            ],
            "apt": ["type=secret,id=apt.mirror", "type=secret,id=ca.pem", *debs],
            "compiled": ["type=bind,from=compile,source=/run/envforge/compiled,target=/run/envforge/compiled"],
        }
        return table.get(use) or [f"type=bind,source=build/parts/{use},target={_PARTS}/{use}"]


def compile_stage(plan: Plan, base: str, memory_gib: float) -> Compile:
    """The compile stage for a plan: architectures of its fleet, jobs by memory (about 8 GiB each, at least one)."""
    return Compile(base=base, arch_list=";".join(plan.target.sm), max_jobs=max(1, int(memory_gib // 8)))


def as_json(value: Any) -> str:
    """Compact JSON for files inside the image."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
