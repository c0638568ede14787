"""An environment folder as a venv build leaves it, around packages that are there already.

Stood in for: the installed packages, which are those of an environment on this machine, reached by a path file. All
else is the image's own. The same folder becomes an image under /opt/envforge, to which the job mounts the packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envforge.image.context import site_files
from envforge.image.render import TEMPLATES

CPU = {"schema": 1, "variant": "cpu", "tier": "cpu", "address": "0" * 64}
GPU = {
    "schema": 1, "variant": "cu126", "tier": "native", "driver_floor": "525.60.13", "sm": ["7.0", "8.0", "9.0"],
    "ptx": [], "planned_sm": ["7.0", "8.0"], "address": "1" * 64,
}  # fmt: skip
_TORCHRUN = "import sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"
_ASK = """
import importlib.metadata, json, sys, sysconfig
pins = {}
for name in ("torch", "transformers", "peft", "accelerate", "datasets"):
    try:
        pins[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps([sys._base_executable, sys.base_prefix, sys.prefix, sysconfig.get_path("purelib"),
                  ".".join(map(str, sys.version_info[:2])), pins]))
"""


@dataclass(frozen=True)
class Packages:
    """An environment on this machine: its interpreter, prefixes, site-packages, Python and some versions."""

    base: str
    base_prefix: str
    prefix: str
    site: str
    python: str
    pins: dict[str, str]

    @property
    def mounts(self) -> list[str]:
        """As words of `job slurm`: what a container needs to see of them."""
        return [word for path in {self.base_prefix, self.prefix} for word in ("--mount", f"{path}:{path}")]


def packages(python: str = sys.executable) -> Packages:
    """Those of an interpreter."""
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True)
    return Packages(*json.loads(done.stdout))


def torch_packages() -> Packages:
    """Those that hold torch: of this interpreter, or of the one that ENVFORGE_TEST_TORCH names."""
    return packages(os.environ.get("ENVFORGE_TEST_TORCH") or sys.executable)


def make_environment(
    root: Path, facts: dict[str, Any] = CPU, these: Packages | None = None, inside: str | None = None
) -> Path:
    """The folder, made new; `inside` is where it will stand."""
    these = these or packages()
    env = root / "env"
    site = env / "lib" / f"python{these.python}" / "site-packages"
    for folder in (root / "bin", env / "bin", site):
        folder.mkdir(parents=True)
    (env / "bin" / "python").symlink_to(these.base)
    (env / "pyvenv.cfg").write_text(f"home = {Path(these.base).parent}\ninclude-system-site-packages = false\n")
    (site / "packages.pth").write_text(these.site + "\n")
    for name, file in site_files().items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
        (site / name).write_bytes(content)
    (env / "bin" / "torchrun").write_text(f"#!{inside or root}/env/bin/python\n{_TORCHRUN}")
    shutil.copy(TEMPLATES / "image" / "entrypoint.sh", root / "bin" / "envforge-entrypoint")
    for program in (root / "bin" / "envforge-entrypoint", env / "bin" / "torchrun"):
        program.chmod(0o755)
    shutil.copy(TEMPLATES / "image" / "preflight.py", root / "preflight.py")
    (root / "preflight.json").write_text(json.dumps(facts))
    (root / "requirements.txt").write_text("".join(f"{name}=={version}\n" for name, version in these.pins.items()))
    (root / "verify.json").write_text(json.dumps({"stack": "transformers", "steps": 4, "max_length": 128}))
    (root / "plan.json").write_text(json.dumps(plan_of(facts, these), sort_keys=True, indent=1) + "\n")
    return root


def plan_of(facts: dict[str, Any], these: Packages) -> dict[str, Any]:
    """A plan that pins what is there."""
    target = {"arch": "x86_64", "glibc": None, "driver": None, "driver_floor": facts.get("driver_floor"),
              "sm": facts.get("planned_sm", []), "hosts": ["n1"], "memory_mib": None}  # fmt: skip
    pins = {name: version.partition("+")[0] for name, version in these.pins.items()}
    return {
        "schema": 1, "python": these.python, "variant": facts["variant"], "tier": facts["tier"], "pins": pins,
        "requests": [], "target": target, "reasons": {}, "warnings": [], "extras": {}, "constraints": [],
        "undated": [], "source_only": [], "left_out": [], "as_of": None, "cuda": None, "matrix_hash": "",
        "matrix_as_of": "",
    }  # fmt: skip


def record_node(folder: Path, driver: str = "550.54.15", **changes: Any) -> Path:
    """A record folder as the host probe writes it: one A100 that nobody uses, unless said otherwise."""
    folder.mkdir(parents=True)
    gpu = {"index": 0, "name": "NVIDIA A100-SXM4-80GB", "sm": "8.0", "memory_mib": 81920, "memory_used_mib": 4,
           "mig": False, "processes": [], **changes}  # fmt: skip
    (folder / "nvml.json").write_text(json.dumps({"driver": driver, "gpus": [gpu]}))
    (folder / "shm_mib").write_text("64000")
    (folder / "disk_mib").write_text("500000")
    return folder
