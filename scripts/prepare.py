"""What the tests need beside Python packages: the engine's system packages, and the CPU build of torch.

Says what it could not do instead of failing: the tests that need it are then named as left out, and CI fails on that.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

# command -> Debian package that brings it
SYSTEM = {
    "dockerd": "docker.io",
    "debootstrap": "debootstrap",
    "dash": "dash",
    "busybox": "busybox",
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "runc": "runc",
    "docker-registry": "docker-registry",
    "podman": "podman",
    "buildah": "buildah",
    "skopeo": "skopeo",
    "umoci": "umoci",
    "mksquashfs": "squashfs-tools",
}
TORCH = "2.13.0"
STACK = [
    *("transformers==5.17.0", "peft==0.21.2", "accelerate==1.15.0", "datasets==4.8.5", "gguf", "sentencepiece"),
    "bitsandbytes==0.50.2",
]


def system_packages() -> None:
    """apt-get install of what is missing, when root on a Debian system."""
    missing = sorted({package for command, package in SYSTEM.items() if shutil.which(command) is None})
    if not missing:
        return
    if os.geteuid() != 0 or not Path("/etc/debian_version").exists():
        print(f"left out: {', '.join(missing)} can only be installed as root on Debian", file=sys.stderr)
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # The engine's own service must not start: the tests run a private one.
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        subprocess.run(["apt-get", "update", "-qq"], env=env, check=False)
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        if subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=False).returncode:
            print(f"left out: apt-get could not install {', '.join(missing)}", file=sys.stderr)
    finally:
        if ours:
            policy.unlink(missing_ok=True)


def torch_stack() -> None:
    """torch's CPU build and the small stack that the model tests train with. Never a CUDA build: those are GBs."""
    if importlib.util.find_spec("torch") is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet"]
        local = subprocess.run([*pip, f"torch=={TORCH}+cpu"], check=False, capture_output=True)
        if local.returncode:
            index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
            if subprocess.run([*pip, *index, f"torch=={TORCH}+cpu"], check=False).returncode:
                print("left out: the CPU build of torch cannot be had from here", file=sys.stderr)
                return
    if any(importlib.util.find_spec(name) is None for name in ("peft", "gguf", "bitsandbytes")):
        command = [sys.executable, "-m", "pip", "install", "--quiet", f"torch=={TORCH}+cpu", *STACK]
        subprocess.run(command, check=False)


if __name__ == "__main__":
    system_packages()
    torch_stack()
