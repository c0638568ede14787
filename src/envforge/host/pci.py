"""What lspci says about NVIDIA devices: which are there, of which generation, and which kernel driver holds them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from envforge.host.text import bus

Generation = Literal["before-turing", "turing-to-hopper", "blackwell-or-newer", "unknown"]
_DISPLAY = re.compile(r"\[03[0-9a-f]{2}\]|vga compatible|3d controller|display controller", re.IGNORECASE)
_IDS = re.compile(r"\[10de:([0-9a-f]{4})\]|\b10de:([0-9a-f]{4})\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PciGpu:
    """An NVIDIA display device. `kernel_driver` is None where the listing does not tell; `gone`: answers all ones."""

    bus: str
    device_id: int | None
    name: str
    kernel_driver: str | None = None
    gone: bool = False

    @property
    def generation(self) -> Generation:
        """By the device id, which NVIDIA hands out in order of generations.

        Source: PCI ID Repository (2023.04): GV100, the last before Turing, ends at 1dff; TU102 starts at 1e02; AD106
        and AD107 end below 2900. Blackwell ids start at 2901 (B200) and 2b85 (RTX 5090): seen in public reports.
        """
        if self.device_id is None:
            return "unknown"
        if self.device_id < 0x1E00:
            return "before-turing"
        return "turing-to-hopper" if self.device_id < 0x2900 else "blackwell-or-newer"


def read_lspci(text: str) -> tuple[bool, list[PciGpu]]:
    """-> whether the text lists any device at all, and the NVIDIA display devices in it.

    Takes `lspci`, `-n`, `-nn` and with or without `-k`.
    """
    listed = False
    gpus: list[PciGpu] = []
    open_device = False
    for line in text.splitlines():
        if line[:1].isspace():
            used = re.match(r"\s+Kernel driver in use:\s*(\S+)", line, re.IGNORECASE)
            if used and open_device:
                last = gpus.pop()
                gpus.append(PciGpu(last.bus, last.device_id, last.name, used[1].lower(), last.gone))
            continue
        head = line.split(" ", 1)
        address = bus(head[0])
        open_device = False
        if address is None:
            continue
        listed = True
        rest = head[1] if len(head) > 1 else ""
        ids = _IDS.search(rest)
        numeric = re.match(r"03[0-9a-f]{2}:", rest, re.IGNORECASE)  # `lspci -n`
        if not (ids or "nvidia" in rest.lower()) or not (_DISPLAY.search(rest) or numeric):
            continue
        open_device = True
        number = int(ids[1] or ids[2], 16) if ids else None
        name = rest.split(": ", 1)[-1].strip()
        gpus.append(PciGpu(address, number, name, gone="(rev ff)" in rest.lower()))
    return listed, gpus
