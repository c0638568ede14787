"""Decides what is wrong with a host's GPUs and what to do about it. Ids are stable; docs/detect.md lists them.

One cause gives one problem: the checks that explain why no GPU answers stand in order, and the first that fits wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from envforge.host.facts import GpuFacts, Problem
from envforge.host.pci import PciGpu
from envforge.host.smi import Smi
from envforge.host.text import branch, first_line

# Cards before Turing end with this branch (NVIDIA CUDA Toolkit, Driver and Architecture Matrix page).
LAST_BRANCH_BEFORE_TURING = 580
# Blackwell came with CUDA 12.8, whose driver is of branch 570 (CUDA Toolkit release notes).
FIRST_BRANCH_BLACKWELL = 570
_KILLED = (124, 137, -9)
_NOT_FOUND = (126, 127)


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything the decisions rest on. `answered`: some interface of the driver gave a driver version or a GPU."""

    driver: str | None
    module: str | None
    module_open: bool | None
    module_loaded: bool
    gpus: tuple[GpuFacts, ...]
    smi: Smi
    addresses: frozenset[str]
    asked: bool
    answered: bool
    nvml_started: bool
    smi_rc: int | None
    nvml_rc: int | None
    smi_text: str
    cuda_word: str | None
    pci_listed: bool
    pci: tuple[PciGpu, ...]
    device_nodes: bool | None
    nouveau: bool
    env: Mapping[str, str]
    wsl: bool
    container: bool
    l4t: str | None
    musl: bool
    overridden: bool

    @property
    def slurm(self) -> bool:
        """Inside a Slurm job."""
        return any(self.env.get(name, "").strip() for name in ("SLURM_JOB_ID", "SLURM_JOBID"))

    @property
    def slurm_gave_gpu(self) -> bool:
        """Slurm says that the job or step was given a GPU."""
        given = [self.env.get(name, "").strip() for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")]
        return any(given) or self.env.get("SLURM_GPUS_ON_NODE", "").strip() not in ("", "0")

    @property
    def hidden(self) -> bool:
        """CUDA_VISIBLE_DEVICES lets no GPU through: CUDA stops at the first entry that is no index and no UUID."""
        value = self.env.get("CUDA_VISIBLE_DEVICES")
        if value is None:
            return False
        first = value.split(",")[0].strip()
        return not re.match(r"\d|GPU-|MIG-", first, re.ASCII)


def find_problems(at: Situation) -> tuple[Problem, ...]:
    """All problems, the most basic first."""
    found = [*_no_gpu(at), *_with_gpus(at)]
    if at.cuda_word and not at.l4t and (at.gpus or not found or found[0].id == "gpu-list-unreadable"):
        found.append(_libcuda(at))
    if at.musl:
        found.append(
            Problem(
                "musl-libc",
                "this system's C library is musl; the wheels of torch and its companions need glibc",
                "use a host or a base image with glibc (Debian, Ubuntu, Rocky Linux)",
            )
        )
    return tuple(found)


def _no_gpu(at: Situation) -> Iterator[Problem]:
    """Why the driver, or some or all GPUs, do not answer."""
    if at.l4t:
        yield _jetson(at.l4t)
        return
    if "mismatch" in at.smi.flags:
        yield _mismatch(at)
        return
    lost = _lost(at)
    if lost:
        yield lost
    if at.gpus:
        return
    if at.smi_rc in _KILLED or (at.nvml_rc in _KILLED and not at.answered):
        yield Problem(
            "driver-hung",
            f"{'nvidia-smi' if at.smi_rc in _KILLED else 'NVML'} gave no answer within its time limit; the driver"
            f"{' ' + at.driver if at.driver else ''} is wedged, or busy for very long",
            "look for NVRM and Xid lines in dmesg, then reboot the machine (a hung driver cannot be reloaded); if "
            "nvidia-smi answers after a while, turn on persistence mode (nvidia-smi -pm 1)",
        )
        return
    if lost:
        return
    no_devices = "no-devices" in at.smi.flags or at.nvml_started or (at.smi_rc == 6 and not at.smi_text.strip())
    if at.slurm and not at.slurm_gave_gpu and (at.hidden or no_devices or not at.module_loaded or at.asked):
        yield _no_allocation()
        if not at.module_loaded and not no_devices:
            yield _driver_missing(at)
        return
    if no_devices:
        yield _no_devices(at)
        return
    yield from _no_answer(at)


def _no_answer(at: Situation) -> Iterator[Problem]:
    """Neither NVML nor nvidia-smi got as far as listing devices."""
    flags = at.smi.flags
    first = first_line(at.smi_text)
    if "no-permission" in flags or at.smi_rc == 4:
        yield Problem(
            "driver-no-permission",
            "the driver is there, but this user may not open /dev/nvidia* (NVML: Insufficient Permissions)",
            "add the user to the group that owns /dev/nvidia* (ls -l /dev/nvidia*; often video or render), then log in "
            "again",
        )
    elif "blocked" in flags:
        yield Problem(
            "wsl-gpu-blocked",
            "GPU access is blocked by the operating system: WSL does not pass the GPU through",
            "update the NVIDIA driver on Windows, run `wsl --update` and `wsl --shutdown`, and start WSL again",
        )
    elif at.driver and at.smi.driver == at.driver and at.smi_rc in (None, 0):
        yield Problem(
            "gpu-list-unreadable",
            f"nvidia-smi names driver {at.driver} but its list of GPUs could not be read",
            "record again on the machine itself: envforge detect --record DIR",
        )
    elif not at.module_loaded and not at.driver:
        yield _driver_missing(at)
    elif "nvml-unknown" in flags and at.container:
        yield Problem(
            "container-lost-device-cgroup",
            "NVML fails with Unknown Error inside this container: it lost its right to the GPU devices (a daemon "
            "reload on the host does that)",
            "restart the container; to keep it from coming back, pass the devices by CDI or name the /dev/nvidia* "
            "nodes when the container is started",
        )
    elif at.container and (at.smi_rc in (None, *_NOT_FOUND, 9, 12) or "no-library" in flags or "nvml-failed" in flags):
        yield _container_without_gpu(at)
    elif flags & {"no-library", "no-program"} or (at.smi_rc in (None, 12, *_NOT_FOUND) and "nvml-failed" not in flags):
        yield Problem(
            "driver-library-missing",
            f"the kernel module {at.module or at.driver or ''} is loaded, but the driver's user-space part "
            "(nvidia-smi, libnvidia-ml, libcuda) does not answer or is not installed".replace("  ", " "),
            f"install the driver's libraries and tools of exactly version {at.module or at.driver}"
            if at.module or at.driver
            else "install the driver's libraries and tools of the module's version",
        )
    else:
        yield Problem(
            "driver-unreachable",
            f"the kernel module {at.module or at.driver or ''} is loaded, but nvidia-smi cannot talk to it"
            f" ({first or f'exit code {at.smi_rc}'})".replace("  ", " "),
            "look for NVRM lines in dmesg; check that /dev/nvidiactl exists and that the installed driver packages "
            "belong together; then reload the nvidia modules or reboot",
        )


def _driver_missing(at: Situation) -> Problem:
    if at.wsl:
        return Problem(
            "driver-missing",
            "WSL has no NVIDIA driver: under WSL the driver is installed on Windows, and its libraries appear in "
            "/usr/lib/wsl/lib",
            "install or update the NVIDIA driver on Windows (never a Linux driver inside WSL), then run "
            "`wsl --update` and `wsl --shutdown`; if /usr/lib/wsl/lib is there, put it on the loader's path"
            if "no-library" in at.smi.flags
            else "install or update the NVIDIA driver on Windows (never a Linux driver inside WSL), then run "
            "`wsl --update` and `wsl --shutdown`",
        )
    if at.pci_listed and not at.pci:
        return Problem(
            "driver-missing",
            "no NVIDIA driver is loaded, and the PCI bus lists no NVIDIA GPU: this host has none",
            "describe the host that is meant (--host, --driver with --gpu), or say --driver none for a CPU plan",
        )
    card = f" for {at.pci[0].name}" if at.pci else ""
    if at.nouveau:
        return Problem(
            "driver-missing",
            f"no NVIDIA driver is loaded{card}: the nouveau driver holds the GPU, and CUDA cannot use that one",
            "install the NVIDIA driver (it blacklists nouveau) and reboot",
        )
    where = " inside this container" if at.container else ""
    return Problem(
        "driver-missing",
        f"no NVIDIA driver is loaded{card}{where}: nvidia-smi cannot reach one, and neither /proc nor /sys shows "
        "a module",
        "install the NVIDIA driver on the host and reboot; after a kernel update the module may have to be built "
        "again (dkms status), and with Secure Boot it must be signed",
    )


def _mismatch(at: Situation) -> Problem:
    library = at.smi.library or "of a version that is not told"
    module = at.module or "of another one"
    again = "restart the container, and reboot the host if it was upgraded; " if at.container else ""
    return Problem(
        "driver-library-mismatch",
        f"the driver's user-space library is {library}, the loaded kernel module is {module}: the driver was upgraded "
        "and the old module stayed loaded",
        f"{again}reboot, or stop everything that uses the GPU and reload the nvidia modules "
        "(rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; modprobe nvidia)",
    )


def _lost(at: Situation) -> Problem | None:
    reset = [row for row in at.smi.lost if "reset" in row.why.lower()]
    gone = [device.bus for device in at.pci if device.gone and all(row.where != device.bus for row in at.smi.lost)]
    if at.smi.lost and len(reset) == len(at.smi.lost):
        return Problem(
            "gpu-requires-reset",
            "GPU at " + "; ".join(f"{row.where}: {row.why}" for row in reset),
            "stop everything that uses it, then reset it (nvidia-smi --gpu-reset -i INDEX, as root) or reboot",
        )
    fallen = [f"{row.where}: {row.why}" for row in at.smi.lost] + [f"{bus}: answers all ones" for bus in gone]
    if not fallen and ("lost" in at.smi.flags or (at.smi_rc == 15 and not at.gpus)):
        fallen = ["an address that nvidia-smi does not name: GPU is lost"]
    if not fallen:
        return None
    rest = f"; {len(at.gpus)} other GPU(s) still answer" if at.gpus else ""
    return Problem(
        "gpu-lost",
        f"the driver cannot reach the GPU at {', and at '.join(fallen)} (fallen off the bus){rest}",
        "look for Xid 79 in dmesg, then reboot or power-cycle the machine; if it comes back, check power, cooling and "
        "seating of the card",
    )


def _no_allocation() -> Problem:
    return Problem(
        "no-gpu-in-allocation",
        "this is a Slurm job to which no GPU was given",
        "ask for one: --gres=gpu:1 or --gpus=1 (with a partition that has GPUs), then look again inside the job",
    )


def _no_devices(at: Situation) -> Problem:
    """The driver answers and lists nothing."""
    version = f"driver {at.driver or at.module} is loaded" if at.driver or at.module else "a driver is loaded"
    if at.wsl:
        return Problem(
            "gpu-not-initialised",
            f"{version} on Windows, but WSL lists no GPU",
            "update the NVIDIA driver on Windows, run `wsl --update` and `wsl --shutdown`, and start WSL again",
        )
    if at.container and (
        not at.pci
        or at.device_nodes is False
        or at.env.get("NVIDIA_VISIBLE_DEVICES", "all").lower() in ("", "none", "void")
    ):
        return _container_without_gpu(at)
    if at.pci_listed and not at.pci:
        return Problem(
            "gpu-not-on-bus",
            f"{version}, but the PCI bus lists no NVIDIA GPU: none is fitted, passed through or awake",
            "check the card's seating and power, the BIOS, and the pass-through of a virtual machine",
        )
    card = at.pci[0] if at.pci else None
    number = branch(at.driver or at.module)
    text = f"{version}, but no GPU came up" + (f" ({card.name} is on the bus at {card.bus})" if card else "")
    general = (
        "look for NVRM lines in dmesg; check that the kernel module's flavour (open kernel module or proprietary) fits "
        "the card, and in the BIOS Above 4G Decoding and Resizable BAR"
    )
    generation = card.generation if card else "unknown"
    if generation == "before-turing" and number > LAST_BRANCH_BEFORE_TURING:
        text += f"; cards before Turing are known up to branch {LAST_BRANCH_BEFORE_TURING}, driver {number} is past it"
        general = f"install a driver of branch {LAST_BRANCH_BEFORE_TURING} with the proprietary kernel module"
    elif generation == "before-turing" and at.module_open:
        text += "; the open kernel module is loaded, and cards before Turing need the proprietary one"
        general = "install the proprietary flavour of the kernel module, then reboot"
    elif generation == "blackwell-or-newer" and number and number < FIRST_BRANCH_BLACKWELL:
        text += f"; this generation is known from branch {FIRST_BRANCH_BLACKWELL} on"
        general = f"install a driver of branch {FIRST_BRANCH_BLACKWELL} or newer with the open kernel module"
    elif generation == "blackwell-or-newer" and at.module_open is not True:
        text += "; this generation (Blackwell, RTX 50) needs the open kernel module"
        if at.module_open is False:
            text += ", and the proprietary one is loaded"
        general = "install the open kernel module (nvidia-open, or the package with -open in its name); " + general
    return Problem("gpu-not-initialised", text, general)


def _container_without_gpu(at: Situation) -> Problem:
    shown = at.env.get("NVIDIA_VISIBLE_DEVICES")
    said = f" (NVIDIA_VISIBLE_DEVICES={shown})" if shown is not None else ""
    return Problem(
        "container-without-gpu",
        f"the host has driver {at.driver or at.module or '(version not told)'}, but this container was given no GPU "
        f"device or no driver library{said}",
        "start it with --gpus all (docker) or --device nvidia.com/gpu=all (podman, CDI), with the NVIDIA container "
        "toolkit on the host; in Kubernetes ask for nvidia.com/gpu; in apptainer use --nv",
    )


def _jetson(release: str) -> Problem:
    named = f" (L4T {release})" if release != "unknown" else ""
    return Problem(
        "jetson-l4t",
        f"this is a Tegra (Jetson) host: it runs an L4T release{named}, not a driver of the desktop and data-centre "
        "branches, and the wheels for those have no code for it; Jetson is not covered",
        "use NVIDIA's own torch builds for this JetPack release, or plan for another host",
    )


def _with_gpus(at: Situation) -> Iterator[Problem]:
    """GPUs answer; what may still keep CUDA from using them."""
    if not at.gpus or at.l4t:
        return
    if at.hidden:
        value = at.env.get("CUDA_VISIBLE_DEVICES", "")[:60]
        if at.slurm and not at.slurm_gave_gpu:
            yield _no_allocation()
        else:
            yield Problem(
                "gpus-hidden",
                f"CUDA_VISIBLE_DEVICES={value!r} lets CUDA see none of the {len(at.gpus)} GPU(s)",
                "unset CUDA_VISIBLE_DEVICES, or set it to indices or UUIDs that nvidia-smi -L lists",
            )
    if any(gpu.mig for gpu in at.gpus) and "no-mig-devices" in at.smi.flags:
        yield Problem(
            "mig-without-instances",
            "MIG is enabled but no MIG instance exists, so CUDA finds no device",
            "create instances (nvidia-smi mig -cgi PROFILE -C, as root), or turn MIG off (nvidia-smi -i INDEX -mig 0)",
        )
    if at.container or at.slurm or at.wsl or not at.addresses:
        return
    named = {row.where for row in at.smi.lost}
    silent = [
        device
        for device in at.pci
        if device.bus not in at.addresses
        and device.bus not in named
        and not device.gone
        and device.kernel_driver in (None, "nvidia")
    ]
    if silent:
        yield Problem(
            "gpu-missing",
            "on the bus but not in the driver's list: "
            + ", ".join(f"{device.name} at {device.bus}" for device in silent),
            "look for NVRM lines in dmesg: the driver may not know this card any more, or could not start it",
        )


def _libcuda(at: Situation) -> Problem:
    word = at.cuda_word or ""
    if at.wsl:
        return Problem(
            "libcuda-unreadable",
            f"the driver answers but libcuda does not (CUDA version: {word}): under WSL another libcuda hides the one "
            "of the Windows driver in /usr/lib/wsl/lib",
            "remove Linux driver packages (libcuda1, libnvidia-compute-*) from WSL, keep /usr/lib/wsl/lib first in "
            "the loader's search, then run `wsl --shutdown`",
        )
    shown = at.env.get("NVIDIA_DRIVER_CAPABILITIES")
    said = f"; NVIDIA_DRIVER_CAPABILITIES={shown} leaves it out" if shown and not _has_compute(shown) else ""
    return Problem(
        "libcuda-unreadable",
        f"the driver answers but libcuda does not (CUDA version: {word}){said}",
        "in a container: start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility; on a host: install the driver's "
        "libcuda (libcuda1, libnvidia-compute, nvidia-driver-cuda) of the same version",
    )


def _has_compute(value: str) -> bool:
    return bool({"compute", "all"} & {word.strip().lower() for word in value.split(",")})
