"""Distributed: several processes meet, add up a tensor, and take one step whose gradients are the mean of theirs.

Each rank is a process of its own with the variables that torchrun sets; NCCL with a GPU for each, gloo on the CPU. A
rank that dies ends the others; one that hangs is named with the phase it stands in. What NCCL says of its transport is
read from the ranks' logs: TCP although the node has InfiniBand is a failure, because nothing else tells of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envforge.verify.process import TELLING, last_line, signal_name
from envforge.verify.record import Check, Fail, Recorder, Skip
from envforge.verify.settings import Settings

GRACE = 3.0  # seconds that the other ranks get to say something after one has died


@dataclass
class Rank:
    """One process: its log, the phases it reached, and its figures."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path
    said: Path
    phases: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def listen(self) -> None:
        """Read what it wrote down."""
        if not self.said.exists():
            return
        for line in self.said.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line that is being written
                event = json.loads(line)
                self.phases.append(event["phase"])
                self.figures.update(event["figures"])

    def text(self) -> str:
        """Its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def where(self) -> str:
        """The phase that it was in when it ended."""
        return f"in {self.phases[-1]}" if self.phases else "before it began"


def run(settings: Settings, recorder: Recorder) -> None:
    """Start the ranks, wait, and judge what each says."""
    ranks: list[Rank] = []
    with recorder.check("ranks") as check:
        check.figure(processes=settings.processes, backend="nccl" if settings.device == "cuda" else "gloo")
        if settings.processes < 2:
            raise Skip("one process: nothing to join (--processes 2 runs it)")
        ranks = start(settings)
        try:
            wait(ranks, 0.9 * settings.limits.get("distributed", 600.0))
        finally:
            for rank in ranks:
                if rank.process.poll() is None:
                    rank.process.kill()
                rank.process.wait()
                rank.listen()
                print(f"--- rank {rank.number}\n{rank.text()[-3000:]}", flush=True)
            check.figure(phases={str(rank.number): rank.phases for rank in ranks})
        check.say(f"{len(ranks)} processes met over {check.figures['backend']} and ended properly")
    if not ranks or recorder.failed:
        return
    all_reduce(recorder, ranks)
    gradients(recorder, ranks)
    transport(recorder, "\n".join(rank.text() for rank in ranks), active_devices(Path(settings.infiniband)))


def start(settings: Settings) -> list[Rank]:
    """All processes; they find each other through a free port of this machine."""
    work = Path(settings.workdir)
    file = work / "ranks.settings.json"
    settings.dump(file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = settings.processes
    threads = max(1, (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1) // world)
    ranks = []
    for number in range(world):
        env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world))
        env.update(RANK=str(number), LOCAL_RANK=str(number), OMP_NUM_THREADS=str(threads))
        env.setdefault("NCCL_DEBUG", "INFO")  # its transport is told nowhere else
        log, said = work / f"rank-{number}.log", work / f"rank-{number}.said"
        said.unlink() if said.exists() else None
        command = [sys.executable, "-m", "envforge.verify.rank", str(file), str(said)]
        with log.open("wb") as output:
            # In the group of this process, so that the supervisor ends them all.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        ranks.append(Rank(number, process, log, said))
    return ranks


def wait(ranks: list[Rank], seconds: float) -> None:
    """Until all have ended.

    Raises:
        Fail: one died (which, how, where and its last words), or did not end in time.
    """
    deadline = time.monotonic() + seconds
    while any(rank.process.poll() is None for rank in ranks):
        if any(rank.process.poll() for rank in ranks):
            stop = time.monotonic() + GRACE
            while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < stop:
                time.sleep(0.05)
            break
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.listen()
            stuck = [rank for rank in ranks if rank.process.poll() is None]
            listed = ", ".join(f"rank {rank.number} {rank.where()}" for rank in stuck)
            for rank in ranks:
                rank.phases.clear()
            raise Fail(f"no end within {seconds:g} s: {listed}; the others wait for what hangs")
        time.sleep(0.05)
    dead = [rank for rank in ranks if rank.process.poll()]
    if not dead:
        return
    # One ended by a signal is the cause; the others only lost their peer.
    first = min(dead, key=lambda rank: (rank.process.returncode > 0, rank.number))
    first.listen()
    where = first.where()
    first.phases.clear()
    code = first.process.returncode
    how = f"was ended by {signal_name(code)}" if code < 0 else f"ended with code {code}"
    words = [line.strip() for line in first.text().splitlines() if any(word in line for word in TELLING)]
    said = words[-1][:300] if words else last_line(first.text())
    also = f"; {len(dead) - 1} more followed" if len(dead) > 1 else ""
    raise Fail(f"rank {first.number} {how} {where}: {said}{also}")


def all_reduce(recorder: Recorder, ranks: list[Rank]) -> None:
    """The sum is right on every rank; time and bandwidth of the slowest."""
    with recorder.check("all-reduce") as check:
        rows = [rank.figures for rank in ranks]
        wrong = [rank.number for rank in ranks if not rank.figures.get("sum_right")]
        seconds = max(row.get("all_reduce_seconds", 0.0) for row in rows)
        mib = rows[0].get("all_reduce_mib", 0)
        check.figure(mib=mib, milliseconds=round(1e3 * seconds, 3))
        if wrong:
            raise Fail(f"ranks {wrong} got a wrong sum: the collective is broken")
        share = 2 * (len(ranks) - 1) / len(ranks)  # what each rank sends of the whole, in a ring
        bus = share * mib / 1024 / max(seconds, 1e-9)
        check.figure(bus_gib_per_s=round(bus, 3))
        check.say(f"{mib} MiB in {1e3 * seconds:.1f} ms, {bus:.2f} GiB/s on the bus")


def gradients(recorder: Recorder, ranks: list[Rank]) -> None:
    """After a step of DistributedDataParallel all ranks hold the mean of their gradients, and the same weights."""
    with recorder.check("step") as check:
        rows = {rank.number: rank.figures for rank in ranks}
        for name in ("gradient_spread", "gradient_error", "weight_spread", "own_difference", "loss"):
            check.figure(**{name: {str(number): row.get(name) for number, row in rows.items()}})
        worst = {name: max(float(row[name]) for row in rows.values()) for name in ("gradient_spread", "weight_spread")}
        if not worst["gradient_spread"] <= 1e-6:
            raise Fail(f"gradients differ between the ranks by up to {worst['gradient_spread']:.3g}")
        error = max(float(row["gradient_error"]) for row in rows.values())
        if not error <= 1e-2:
            raise Fail(f"the shared gradient is not the mean of the ranks' own: off by {error:.3g} of its size")
        if not worst["weight_spread"] <= 1e-6:
            raise Fail(f"after the step the weights differ between the ranks by up to {worst['weight_spread']:.3g}")
        check.say("one step: gradients are the mean of the ranks' own, weights stay equal")


_CHANNEL = re.compile(r"NCCL INFO .*?\bvia ((?:P2P|SHM|NET|COLL)\S*)")
_NETWORK = re.compile(r"NCCL INFO (?:Using network |NET/(?=\w+ : Using )|.*Assigned NET plugin )(\w+)")


def transports(log: str) -> tuple[dict[str, int], list[str]]:
    """What NCCL says it uses: "P2P/CUMEM" -> channels, and the networks it chose ("IB", "Socket")."""
    found = Counter(match.group(1).rstrip(",") for match in _CHANNEL.finditer(log))
    return dict(found), sorted({match.group(1) for match in _NETWORK.finditer(log)})


def active_devices(folder: Path) -> list[str]:
    """InfiniBand (or RoCE) devices with a port that is up, from sysfs; [] where there are none."""
    found = []
    for state in sorted(folder.glob("*/ports/*/state")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                found.append(state.parts[-4])
    return list(dict.fromkeys(found))


def transport(recorder: Recorder, log: str, devices: list[str]) -> None:
    """The way the data takes; TCP where InfiniBand is there fails."""
    with recorder.check("transport") as check:
        channels, networks = transports(log)
        check.figure(channels=channels, networks=networks, infiniband=devices)
        if not channels and not networks:
            raise Skip("gloo on the CPU goes over TCP" + (f"; {', '.join(devices)} not used" if devices else ""))
        tcp = "Socket" in networks or any(name.startswith("NET/Socket") for name in channels)
        if tcp and devices:
            raise Fail(
                f"this node has InfiniBand ({', '.join(devices)}), NCCL took TCP sockets: between nodes training would "
                "be many times slower; the image lacks the RDMA libraries (libibverbs, librdmacm), /dev/infiniband is "
                "not in the container, the memory lock limit is too low, or NCCL_IB_DISABLE is set"
            )
        say(check, channels, networks)


def say(check: Check, channels: dict[str, int], networks: list[str]) -> None:
    """The sentence of the report."""
    ways = ", ".join(f"{name} ({count} channels)" for name, count in sorted(channels.items())) or "no channel told"
    check.say(ways + (f"; between nodes {', '.join(networks)}" if networks else ""))
