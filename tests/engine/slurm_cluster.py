"""A private Slurm on this machine: munge, controller and two node daemons in a temporary folder, ended by their ids.

Real: munged, slurmctld, slurmd, sbatch and all that talk to them, of the distribution. Stood in for: the second machine
(Debian's build runs several slurmd on one) and the GPUs (gres that point to /dev/null). No cgroup plugin is used.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
NODES = ("n1", "n2")
LEFT = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")

CONF = """\
ClusterName=envforge
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerParameters=sched_min_interval=200000,bf_interval=2
SlurmctldParameters=idle_on_node_suspend
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=2000 Gres=gpu:2 Feature=a100,big
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=2000 Gres=gpu:2 Feature=v100
PartitionName=main Nodes=ALL Default=YES MaxTime=60 OverSubscribe=FORCE:4 State=UP
"""
# Slurm hands a bundle to the runtime that is named here; %n.%u.%j.%s.%t is the container's name.
OCI = "".join(
    f'RunTime{word}="runc --root={{folder}}/runc {call} %n.%u.%j.%s.%t"\n'
    for word, call in (
        ("Query", "state"), ("Kill", "kill -a"), ("Delete", "delete --force"), ("Run", "run --bundle=%b"),
    )
)  # fmt: skip


class CannotStart(Exception):
    """Slurm cannot run here; the message says why."""


@dataclass
class Slurm:
    """The running cluster. `env`: what its programs need, for whoever calls them."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """Variables for every client."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __call__(self, *words: str) -> str:
        """Run one of Slurm's programs; -> its output."""
        done = subprocess.run(
            words, capture_output=True, text=True, env={**os.environ, **self.env}, check=False, timeout=60
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """The job's state in Slurm's words."""
        return self("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()

    def wait(self, job: str, until: Callable[[str], bool] = lambda word: word not in LEFT, seconds: float = 240) -> str:
        """Wait for a state; -> it."""
        end = time.monotonic() + seconds
        while True:
            word = self.state(job)
            if until(word):
                return word
            assert time.monotonic() < end, f"job {job} is {word} after {seconds} s\n{self.tail()}"
            time.sleep(0.3)

    def exit_code(self, job: str) -> str:
        """`code:signal` of an ended job."""
        shown = self("scontrol", "show", "job", job, "--oneliner")
        return next(word for word in shown.split() if word.startswith("ExitCode=")).partition("=")[2]

    def tail(self) -> str:
        """The last lines of the daemons' logs."""
        return "\n".join(
            f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-12:])
            for path in sorted(self.folder.glob("*.log"))
        )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


def _start(cluster: Slurm, argv: list[str]) -> None:
    with (cluster.folder / f"{argv[0]}.out").open("ab") as out:
        cluster.processes.append(
            subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **cluster.env})
        )


def _until(ready: Callable[[], bool], cluster: Slurm, what: str) -> None:
    end = time.monotonic() + 60
    while not ready():
        if time.monotonic() > end or any(process.poll() is not None for process in cluster.processes):
            said = "".join(path.read_text(errors="replace")[-800:] for path in cluster.folder.glob("*.out"))
            raise CannotStart(f"{what} did not start: {said}{cluster.tail()}")
        time.sleep(0.2)


@contextlib.contextmanager
def private_slurm() -> Iterator[Slurm]:
    """A cluster of two nodes; gone, with its folder, when the block ends.

    Raises:
        CannotStart: not here.
    """
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        raise CannotStart(f"Slurm is not installed (Debian: apt-get install {' '.join(missing)})")
    if os.geteuid() != 0:
        raise CannotStart("a private Slurm needs root: its node daemons start what users ask for")
    folder = Path(tempfile.mkdtemp(prefix="envforge-slurm-"))
    cluster = Slurm(folder)
    try:
        ports, host = _free_ports(3), socket.gethostname().partition(".")[0]
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        (folder / "slurm.conf").write_text(CONF.format(host=host, ports=ports, user=getpass.getuser(), folder=folder))
        (folder / "oci.conf").write_text(OCI.format(folder=folder))
        devices = "".join(f"NodeName=n[1-2] Name=gpu File={path}\n" for path in ("/dev/null", "/dev/zero"))
        (folder / "gres.conf").write_text(devices)
        _start(cluster, [
            "munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
        ])  # fmt: skip
        _until((folder / "munge.socket").exists, cluster, "munged")
        _start(cluster, ["slurmctld", "-D", "-i"])
        for node in NODES:
            _start(cluster, ["slurmd", "-D", "-N", node])

        def idle() -> bool:
            done = subprocess.run(
                ["sinfo", "--noheader", "--Node", "--format=%T"],
                capture_output=True, text=True, check=False, env={**os.environ, **cluster.env},
            )  # fmt: skip
            return done.stdout.split() == ["idle"] * len(NODES)

        _until(idle, cluster, "Slurm")
        yield cluster
    finally:
        _stop(cluster)
        shutil.rmtree(folder, ignore_errors=True)


def _stop(cluster: Slurm) -> None:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired, OSError):
        cluster("scancel", "--user", getpass.getuser())
        end = time.monotonic() + 15
        while cluster("squeue", "--noheader").strip() and time.monotonic() < end:
            time.sleep(0.3)
    for process in reversed(cluster.processes):
        process.send_signal(signal.SIGTERM)
    for process in cluster.processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
