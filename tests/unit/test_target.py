"""The shared target options: what they become, and one clear message for everything that they cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envforge.cli.target import Targets
from envforge.errors import DataError, EnvforgeError, NoTargetError, UsageError
from envforge.host import interpret, to_json

L4 = "0, NVIDIA L4, 550.54.15, 8.9, 23034, 1, [N/A], GPU-0d5a6c31, 00000000:00:03.0\n"


@pytest.fixture
def host_file(tmp_path: Path) -> Path:
    path = tmp_path / "l4-node.json"
    path.write_text(json.dumps(to_json(interpret({"nvidia-smi-query.csv": L4, "glibc": "2.31", "arch": "x86_64"}))))
    return path


@pytest.fixture
def record(tmp_path: Path) -> Path:
    folder = tmp_path / "record"
    folder.mkdir()
    (folder / "nvidia-smi-query.csv").write_text(L4)
    return folder


def machine(monkeypatch: pytest.MonkeyPatch, record: dict[str, str]) -> None:
    """What this machine looks like, instead of what it is."""
    monkeypatch.delenv("ENVFORGE_DRIVER", raising=False)
    monkeypatch.setattr("envforge.host.gather", lambda **options: dict(record))


def refused(error: type[EnvforgeError] = UsageError, **options: Any) -> str:
    with pytest.raises(error) as found:
        Targets(**options).read()
    assert found.value.exit_code == 2 and found.value.hint
    assert "\n\n" not in found.value.cause
    return f"{found.value.cause} / {found.value.hint}"


def test_a_described_target_gets_its_capability() -> None:
    (host,) = Targets(driver="550.54.15", gpu=["NVIDIA A100-SXM4-80GB", "sm_90"], glibc="2.31", arch="aarch64").read()
    assert (host.driver, host.glibc, host.arch) == ("550.54.15", "2.31", "aarch64")
    assert [(gpu.name, gpu.sm) for gpu in host.gpus] == [("NVIDIA A100-SXM4-80GB", "8.0"), (None, "9.0")]


def test_what_people_call_things() -> None:
    (host,) = Targets(driver="550.54.15", gpu=["3090"], arch="amd64").read()
    assert (host.gpus[0].sm, host.arch) == ("8.6", "x86_64")
    (host,) = Targets(driver="550.54.15", gpu=["GH200"], arch="arm64").read()
    assert host.arch == "aarch64"


def test_a_host_file_and_a_record_folder_are_the_same(host_file: Path, record: Path) -> None:
    one, other = Targets(host=[host_file, record]).read()
    assert (one.name, other.name) == ("l4-node", "record")
    assert one.driver == other.driver == "550.54.15" and one.gpus == other.gpus and one.gpus[0].sm == "8.9"


def test_one_name_twice_gets_a_number_and_can_be_excluded(host_file: Path) -> None:
    hosts = Targets(host=[host_file, host_file], exclude=["l4-node"]).read()
    assert [host.name for host in hosts] == ["l4-node-2"]
    assert "l4-node" in refused(host=[host_file], exclude=["other"])
    assert "no host" in refused(host=[host_file], exclude=["l4-node"])


def test_a_driver_beside_host_files_asks_what_an_upgrade_gives(host_file: Path) -> None:
    (host,) = Targets(host=[host_file], driver="580.95.05", glibc="2.39").read()
    assert (host.driver, host.glibc, host.gpus[0].sm) == ("580.95.05", "2.39", "8.9")
    (host,) = Targets(host=[host_file], driver="none").read()
    assert host.driver is None and host.gpus == ()


def test_a_cpu_plan_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {})
    for options in ({"driver": "none"}, {"variant": "cpu"}, {"driver": "NONE", "arch": "aarch64"}):
        (host,) = Targets(**options).read()  # type: ignore[arg-type]
        assert not host.has_gpu
    assert host.arch == "aarch64"
    monkeypatch.setenv("ENVFORGE_DRIVER", "none")
    assert not Targets().read()[0].has_gpu


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({}, "driver-missing"),
        ({"nvidia-smi.rc": "124", "sys_module_nvidia_version": "570.158.01"}, "driver-hung"),
        ({"nvidia-smi.rc": "6", "nvidia-smi.txt": "No devices were found", "env": "SLURM_JOB_ID=1"}, "--gres"),
        ({"nv_tegra_release": "# R35 (release), REVISION: 4.1"}, "jetson-l4t"),
    ],
)
def test_a_machine_without_a_working_gpu_is_no_target(
    record: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, record)
    said = refused(NoTargetError)
    assert "this machine" in said and "--driver none" in said and "--variant cpu" in said and "--host" in said
    assert says in said or (says == "--gres" and "no-gpu-in-allocation" in said)
    # A recorded one neither, unless a CPU plan is meant.
    if not record.get("sys_module_nvidia_version"):
        path = tmp_path / "host.json"
        path.write_text(json.dumps(to_json(interpret(record))))
        assert "host.json" in refused(NoTargetError, host=[path])
        assert not Targets(host=[path], variant="cpu").read()[0].has_gpu


def test_this_machine_is_taken_when_it_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {"nvidia-smi-query.csv": L4, "arch": "x86_64", "glibc": "2.36"})
    (host,) = Targets(glibc="2.28").read()
    assert (host.name, host.driver, host.glibc, host.gpus[0].sm) == ("this-machine", "550.54.15", "2.28", "8.9")
    monkeypatch.setenv("ENVFORGE_DRIVER", "580.95.05")
    assert Targets().read()[0].driver == "580.95.05"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"driver": "550.54.15-open"}, "550.54.15?"),
        ({"driver": "v550"}, "550.54.15"),
        ({"driver": "５５０.54.15"}, "５５０"),
        ({"driver": "12.4"}, "12.4"),
        ({"driver": ""}, "driver version"),
        ({"driver": "5" * 5000}, "..."),
        ({"driver": "550.54.15", "gpu": ["A1000"]}, "A100"),
        ({"driver": "550.54.15", "gpu": ["RTX 4O90"]}, "RTX 4090"),
        ({"gpu": ["sm_8"]}, "sm_86"),
        ({"gpu": ["sm_8x"]}, "sm_86"),
        ({"gpu": ["8"]}, "sm_86"),
        ({"gpu": [" "]}, "sm_86"),
        ({"gpu": ["NVIDIA Ä100"]}, "ASCII"),
        ({"gpu": ["L4\nRUN x"]}, "ASCII"),
        ({"gpu": ["x" * 500]}, "too long"),
        ({"driver": "none", "gpu": ["L4"]}, "driver is none"),
        ({"driver": "none", "glibc": "2"}, "2.35"),
        ({"driver": "none", "arch": "ppc64le"}, "x86_64"),
        ({"driver": "none", "python": "3"}, "3.11"),
        ({"driver": "none", "python": "3.99"}, "3.11"),
        ({"driver": "none", "python": "3.11.2"}, "3.11"),
        ({"variant": "cu12"}, "cu126"),
        ({"variant": "CPU "}, "cpu"),
    ],
)
def test_bad_values_are_one_clear_message(options: dict[str, Any], says: str) -> None:
    assert says in refused(**options)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no JSON"),
        (b"| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15 |", "nvidia-smi.txt"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"gpus": []}', "not a host file"),
        (b"[1, 2]", "not a host file"),
        (b'{"schema": 2, "gpus": [], "driver": null}', "not a host file"),
        (b'{"schema": 1, "gpus": [5], "driver": null}', "damaged"),
        (b'{"schema": 1, "gpus": 5, "driver": "550.54.15"}', "damaged"),
        (b'{"schema": 1, "gpus": [], "driver": "latest"}', "550.54.15"),
        (b'{"schema": 1, "gpus": [{"name": "Apple M9"}], "driver": "550.54.15"}', "nearest"),
        (b'{"schema": 1, "gpus": [], "driver": "550.54.15", "arch": "riscv64"}', "riscv64"),
    ],
)
def test_files_of_other_tools_are_named(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.write_bytes(content)
    assert says in refused(host=[path])


def test_missing_files_and_a_gpu_beside_a_host_are_refused(tmp_path: Path, host_file: Path) -> None:
    assert "no such" in refused(host=[tmp_path / "missing"])
    assert "record file" in refused(host=[tmp_path / "r"]) if (tmp_path / "r").mkdir() is None else True
    assert "--gpu" in refused(host=[host_file], gpu=["L4"])
    with pytest.raises(UsageError, match="no such file"):
        Targets(fleet=tmp_path / "missing").read()


FLEET = """\
hosts:
  - name: old
    driver: "470.86"
    gpus: [Tesla V100-SXM2-32GB]
    count: 8
    glibc: "2.28"
    labels: {rack: r1}
  - name: new
    driver: 580.95.05
    gpus: [NVIDIA H100 80GB HBM3, sm_90]
  - {name: login, driver: none}
"""


def test_a_fleet_file_as_mapping_or_list(tmp_path: Path, host_file: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    old, new, login = Targets(fleet=path).read()
    assert (old.count, old.glibc, old.labels, old.gpus[0].sm) == (8, "2.28", {"rack": "r1"}, "7.0")
    assert [gpu.sm for gpu in new.gpus] == ["9.0", "9.0"] and not login.has_gpu
    path.write_text("".join(f"{line[2:]}\n" for line in FLEET.splitlines()[1:]))
    names = [host.name for host in Targets(host=[host_file], fleet=path, exclude=["login"]).read()]
    assert names == ["l4-node", "old", "new"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts: []", ":1:"),
        ("", "fleet.yaml"),
        ("just words", "fleet.yaml"),
        ("- {name: a, driver: 470.86}", '"470.86"'),
        ("- {name: a, driver: latest}\n- {name: b, driver: 550.54.15, gpus: [sm_8]}", "fleet.yaml:2"),
        ("- {name: a, driver: none, color: red}", "color"),
        ("- {name: a, driver: none}\n- {name: a, driver: none}", "twice"),
        ("- {name: a, driver: none, count: 0}", "count"),
        ("- {name: a, driver: none, name: b}", "twice"),
        ("- &x {name: a, driver: none}\n- *x", "anchor"),
        ("hosts: {name: a}", "fleet.yaml:1"),
    ],
)
def test_faults_of_a_fleet_file_have_their_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    assert says in refused(DataError, fleet=path)


def test_all_faults_of_a_fleet_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("- {name: a, driver: latest}\n- {name: b, driver: 550.54.15, gpus: [sm_8]}\n")
    said = refused(DataError, fleet=path)
    assert "fleet.yaml:1: hosts 1" in said and "fleet.yaml:2: hosts 2" in said
