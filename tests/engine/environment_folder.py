"""An environment folder as a venv build leaves it, around a Python that is there already: entrypoint, preflight, facts.

Stood in for: the installed environment, which is a link to one on this machine; everything else is the image's own.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from envforge.image.render import TEMPLATES

CPU = {"schema": 1, "variant": "cpu", "tier": "cpu", "address": "0" * 64}
GPU = {
    "schema": 1, "variant": "cu126", "tier": "native", "driver_floor": "525.60.13", "sm": ["7.0", "8.0", "9.0"],
    "ptx": [], "planned_sm": ["7.0", "8.0"], "address": "1" * 64,
}  # fmt: skip


def make_environment(root: Path, facts: dict[str, Any] = CPU, prefix: Path = Path(sys.prefix), **pins: str) -> Path:
    """The folder, made new. `pins`: what its plan says is installed."""
    (root / "bin").mkdir(parents=True)
    (root / "env").symlink_to(prefix)
    shutil.copy(TEMPLATES / "image" / "entrypoint.sh", root / "bin" / "envforge-entrypoint")
    (root / "bin" / "envforge-entrypoint").chmod(0o755)
    shutil.copy(TEMPLATES / "image" / "preflight.py", root / "preflight.py")
    (root / "preflight.json").write_text(json.dumps(facts))
    (root / "requirements.txt").write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    (root / "verify.json").write_text(json.dumps({"stack": "transformers", "steps": 4, "max_length": 128}))
    target = {"arch": "x86_64", "glibc": None, "driver": None, "driver_floor": facts.get("driver_floor"),
              "sm": facts.get("planned_sm", []), "hosts": ["n1"], "memory_mib": None}  # fmt: skip
    plan = {
        "schema": 1, "python": ".".join(map(str, sys.version_info[:2])), "variant": facts["variant"],
        "tier": facts["tier"], "pins": pins, "requests": [], "target": target, "reasons": {}, "warnings": [],
        "extras": {}, "constraints": [], "undated": [], "source_only": [], "left_out": [], "as_of": None, "cuda": None,
        "matrix_hash": "", "matrix_as_of": "",
    }  # fmt: skip
    (root / "plan.json").write_text(json.dumps(plan, sort_keys=True, indent=1) + "\n")
    return root


def record_node(folder: Path, driver: str = "550.54.15", **changes: Any) -> Path:
    """A record folder as the host probe writes it: one A100 that nobody uses, unless said otherwise."""
    folder.mkdir(parents=True)
    gpu = {"index": 0, "name": "NVIDIA A100-SXM4-80GB", "sm": "8.0", "memory_mib": 81920, "memory_used_mib": 4,
           "mig": False, "processes": [], **changes}  # fmt: skip
    (folder / "nvml.json").write_text(json.dumps({"driver": driver, "gpus": [gpu]}))
    (folder / "shm_mib").write_text("64000")
    (folder / "disk_mib").write_text("500000")
    return folder
