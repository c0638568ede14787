"""The distributed layer: ranks that die, hang or part, and what NCCL's lines mean. Real processes, no torch, no GPU.

The work of a rank is a stand-in here; tests/model runs the real one over gloo. NCCL's lines are written as its releases
print them.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from envforge.verify.layers import distributed
from envforge.verify.record import FAIL, PASS, SKIP, Check, Recorder
from envforge.verify.settings import Settings
from envforge.verify.supervise import run_layer

RANKS = """
    import os, signal, sys, time

    GOOD = dict(sum_right=True, all_reduce_mib=16, all_reduce_seconds=0.01, gradient_spread=0.0, gradient_error=1e-7,
                weight_spread=0.0, own_difference=0.4, loss=2.0)

    def good(settings, rank, world, say):
        say("meeting")
        say("end", **GOOD)

    def dies(settings, rank, world, say):
        say("meeting")
        if rank == 1:
            say("all-reduce")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def raises(settings, rank, world, say):
        say("wrap")
        if rank == 0:
            raise RuntimeError("CUDA error: out of memory")
        time.sleep(600)

    def hangs(settings, rank, world, say):
        say("meeting")
        if rank == 1:
            time.sleep(600)
        say("end", **GOOD)

    def wrong_sum(settings, rank, world, say):
        say("end", **dict(GOOD, sum_right=rank == 0))

    def other_gradients(settings, rank, world, say):
        say("end", **dict(GOOD, gradient_spread=0.5))

    def not_the_mean(settings, rank, world, say):
        say("end", **dict(GOOD, gradient_error=0.5))

    def other_weights(settings, rank, world, say):
        say("end", **dict(GOOD, weight_spread=0.1))

    def tcp(settings, rank, world, say):
        print("node1:41:52 [%d] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>" % rank)
        print("node1:41:52 [%d] NCCL INFO Using network Socket" % rank)
        print("node1:41:52 [%d] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM" % rank)
        say("end", **GOOD)
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Two ranks whose work can be any function of the module above."""
    (tmp_path / "ranks_of_test.py").write_text(textwrap.dedent(RANKS))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    work = tmp_path / "work"
    work.mkdir()
    return Settings(workdir=str(work), processes=2, infiniband=str(tmp_path / "infiniband"))


def prove(settings: Settings, function: str) -> dict[str, Check]:
    """The layer with these ranks, in a stage process."""
    settings.targets = {"ranks": f"ranks_of_test:{function}"}
    return {check.id.partition(".")[2]: check for check in run_layer("distributed", settings).checks}


def infiniband(settings: Settings, state: str = "4: ACTIVE") -> None:
    """A sysfs with one device, as a stand-in for the node's."""
    port = Path(settings.infiniband) / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state + "\n")


def test_ranks_that_agree_pass(settings: Settings) -> None:
    checks = prove(settings, "good")
    states = {name: check.status for name, check in checks.items()}
    assert states == {"ranks": PASS, "all-reduce": PASS, "step": PASS, "transport": SKIP}
    assert checks["all-reduce"].figures["bus_gib_per_s"] == pytest.approx(16 / 1024 / 0.01, rel=1e-3)
    assert checks["ranks"].figures["phases"] == {"0": ["meeting", "end"], "1": ["meeting", "end"]}


def test_a_rank_that_is_killed_ends_the_others_and_is_named(settings: Settings) -> None:
    check = prove(settings, "dies")["ranks"]
    assert check.status == FAIL and "rank 1 was ended by SIGKILL in all-reduce" in check.text


def test_a_rank_that_raises_is_named_with_its_last_words(settings: Settings) -> None:
    check = prove(settings, "raises")["ranks"]
    assert check.status == FAIL
    assert "rank 0 ended with code 1 in wrap: RuntimeError: CUDA error: out of memory" in check.text


def test_a_rank_that_hangs_is_named_with_its_phase(settings: Settings) -> None:
    settings.limits["distributed"] = 3.0
    check = prove(settings, "hangs")["ranks"]
    assert check.status == FAIL and "no end within 2.7 s: rank 1 in meeting" in check.text


@pytest.mark.parametrize(
    ("function", "name", "words"),
    [
        ("wrong_sum", "all-reduce", "ranks [1] got a wrong sum"),
        ("other_gradients", "step", "gradients differ between the ranks"),
        ("not_the_mean", "step", "not the mean"),
        ("other_weights", "step", "weights differ"),
    ],
)
def test_what_ranks_must_agree_on(settings: Settings, function: str, name: str, words: str) -> None:
    check = prove(settings, function)[name]
    assert check.status == FAIL and words in check.text


def test_tcp_where_infiniband_is_there_fails(settings: Settings) -> None:
    infiniband(settings)
    check = prove(settings, "tcp")["transport"]
    assert check.status == FAIL and "InfiniBand (mlx5_0)" in check.text and "libibverbs" in check.text


def test_tcp_without_infiniband_or_with_a_port_that_is_down_is_told(settings: Settings) -> None:
    infiniband(settings, "1: DOWN")
    check = prove(settings, "tcp")["transport"]
    assert check.status == PASS and "P2P/CUMEM (2 channels)" in check.text and "Socket" in check.text


@pytest.mark.parametrize(
    ("lines", "channels", "networks"),
    [
        (["a:1:2 [0] NCCL INFO Using network IB"], {}, ["IB"]),
        (["a:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>"], {}, ["IB"]),
        (["a:1:2 [0] NCCL INFO NET/IB : No device found."], {}, []),
        (["a:1:2 [0] NCCL INFO Assigned NET plugin Socket to comm"], {}, ["Socket"]),
        (
            ["a:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 8[0] [send] via NET/IB/0(1)/GDRDMA"],
            {"NET/IB/0(1)/GDRDMA": 1},
            [],
        ),
        (["a:1:2 [3] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct"] * 2, {"SHM/direct/direct": 2}, []),
        (["step 3 went via P2P"], {}, []),
    ],
)
def test_what_nccl_says_of_its_way(lines: list[str], channels: dict[str, int], networks: list[str]) -> None:
    assert distributed.transports("\n".join(lines)) == (channels, networks)


def test_one_process_is_left_out() -> None:
    recorder = Recorder("distributed")
    distributed.run(Settings(), recorder)
    assert [check.status for check in recorder.checks] == [SKIP]


def test_bandwidth_is_that_of_the_slowest() -> None:
    ranks: list[Any] = [
        type("R", (), {"number": n, "figures": {"sum_right": True, "all_reduce_mib": 16, "all_reduce_seconds": s}})
        for n, s in ((0, 0.01), (1, 0.04))
    ]
    recorder = Recorder("distributed")
    distributed.all_reduce(recorder, ranks)
    assert recorder.checks[0].figures["milliseconds"] == 40.0
