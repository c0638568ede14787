"""What clusters say of their nodes: Kubernetes labels and Slurm's listings become hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envforge.cli.target import Targets
from envforge.errors import EnvforgeError, NoTargetError, UsageError
from envforge.inventory import Inventory, expand, read_inventory


def node(name: str, arch: str = "amd64", capacity: str | None = "8", **labels: str) -> dict[str, Any]:
    keys = {key.replace("__", "-").replace("_", "."): value for key, value in labels.items()}
    given = {f"nvidia.com/{key}": value for key, value in keys.items()} | {"kubernetes.io/arch": arch}
    status: dict[str, Any] = {"nodeInfo": {"architecture": arch, "osImage": "Ubuntu 22.04.5 LTS"}}
    if capacity:
        status["capacity"] = {"cpu": "96", "nvidia.com/gpu": capacity}
    return {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "labels": given}, "status": status}


def cluster(*nodes: dict[str, Any]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(nodes)})


A100 = node(
    "gpu-a",
    gpu_product="NVIDIA-A100-SXM4-80GB",
    gpu_count="8",
    gpu_memory="81920",
    gpu_compute_major="8",
    gpu_compute_minor="0",
    cuda_driver_major="535",
    cuda_driver_minor="161",
    cuda_driver_rev="08",
)
GH200 = node(
    "gh-1",
    "arm64",
    gpu_product="NVIDIA-GH200-480GB",
    gpu_count="1",
    gpu_compute_major="9",
    gpu_compute_minor="0",
    cuda_driver__version_full="570.124.06",
    cuda_runtime__version_full="12.8",
)
LOGIN = node("login", capacity=None)

SCONTROL = """\
NodeName=gpu01 Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUEfctv=128 CPUTot=128 CPULoad=0.10
   AvailableFeatures=a100,ib
   ActiveFeatures=a100,ib
   Gres=gpu:a100:8(S:0-1),nvme:1
   NodeAddr=gpu01 NodeHostName=gpu01 Version=24.05.3
   OS=Linux 5.15.0-105-generic #115-Ubuntu SMP Mon Apr 15
   State=IDLE ThreadsPerCore=2
   Comment=rack 7 = cold aisle

NodeName=gpu02 Arch=x86_64 CoresPerSocket=32
   AvailableFeatures=v100 Gres=gpu:4
   State=MIXED

NodeName=cpu01 Arch=x86_64 Gres=(null) State=IDLE
"""
SINFO = """\
NODELIST  PARTITION AVAIL_FEATURES GRES
gpu[01-03]  long*     a100,ib      gpu:a100:4(S:0-1)
gpu01       short     a100,ib      gpu:a100:4(S:0-1)
mig01       short     (null)       gpu:a100_1g.5gb:7
cpu[1,3-4]  cpu       (null)       (null)
"""


def read(text: str) -> Inventory:
    found = read_inventory(text, "list")
    assert found is not None
    return found


def test_kubernetes_labels_become_hosts() -> None:
    found = read(cluster(A100, GH200, LOGIN))
    a100, gh200 = found.hosts
    assert (a100.driver, len(a100.gpus), a100.gpus[0].name) == ("535.161.08", 8, "NVIDIA A100 SXM4 80GB")
    assert (a100.gpus[0].sm, a100.gpus[0].memory_mib, a100.os) == ("8.0", 81920, "Ubuntu 22.04.5 LTS")
    assert (gh200.driver, gh200.arch, gh200.cuda_max) == ("570.124.06", "aarch64", "12.8")
    assert [host.name for host in found.without_gpu] == ["login"]


def test_one_node_shared_and_partitioned_gpus() -> None:
    mig = node(
        "m",
        gpu_product="NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",
        gpu_count="7",
        cuda_driver_major="470",
        cuda_driver_minor="86",
    )
    (host,) = read(json.dumps(mig)).hosts
    assert (host.driver, host.gpus[0].mig, host.gpus[0].name) == ("470.86", True, "NVIDIA A100 SXM4 40GB")
    shared = node("s", gpu_product="Tesla-T4-SHARED", gpu_count="1")
    assert read(json.dumps(shared)).hosts[0].gpus[0].name == "Tesla T4"


def test_all_faults_of_a_cluster_are_told_at_once() -> None:
    bad_driver = node("one", gpu_product="Tesla-T4", cuda_driver_major="many")
    unlabelled = node("two")
    with pytest.raises(UsageError) as caught:
        read(cluster(bad_driver, unlabelled, A100))
    assert "one" in caught.value.cause and "two" in caught.value.cause and "gpu.product" in caught.value.cause


def test_scontrol_show_node() -> None:
    found = read(SCONTROL)
    first, second = found.hosts
    assert (first.name, len(first.gpus), first.gpus[0].name) == ("gpu01", 8, "a100")
    assert first.os is not None and first.os.startswith("Linux 5.15") and first.driver is None
    assert (len(second.gpus), second.gpus[0].name) == (4, "v100")  # the gres says no type, a feature does
    assert [host.name for host in found.without_gpu] == ["cpu01"]
    one_line = " ".join(SCONTROL.split("\n\n")[0].split())
    assert read(one_line).hosts[0].gpus == first.gpus


def test_sinfo_lists_a_node_once_for_each_partition() -> None:
    found = read(SINFO)
    assert [host.name for host in found.hosts] == ["gpu01", "gpu02", "gpu03", "mig01"]
    assert found.hosts[3].gpus[0].mig and found.hosts[3].gpus[0].name == "a100" and len(found.hosts[3].gpus) == 7
    assert [host.name for host in found.without_gpu] == ["cpu1", "cpu3", "cpu4"]


def test_slurm_in_json() -> None:
    nodes = [{"name": "g1", "architecture": "aarch64", "gres": "gpu:gh200:1", "features": []}]
    (host,) = read(json.dumps({"meta": {}, "nodes": nodes})).hosts
    assert (host.arch, host.gpus[0].name) == ("aarch64", "gh200")
    row = {"nodes": {"nodes": ["g[1-2]"]}, "gres": {"total": "gpu:h100:4(S:0)"}, "features": {"total": ""}}
    assert [h.name for h in read(json.dumps({"meta": {}, "sinfo": [row]})).hosts] == ["g1", "g2"]


def test_a_gres_without_any_type_says_what_helps() -> None:
    with pytest.raises(UsageError, match="without a type"):
        read("NodeName=x Gres=gpu:8 State=IDLE")


def test_mig_slices_and_features_borrow_the_model_of_their_node() -> None:
    found = read(
        "NodeName=a Gres=gpu:a100:2,gpu:1g.10gb:14(S:0)\nNodeName=b Gres=gpu:2g.20gb:3 AvailableFeatures=h100,ib"
    )
    assert [(g.name, g.mig) for g in found.hosts[0].gpus] == [("a100", False)] * 2 + [("a100", True)] * 14
    assert {(g.name, g.mig) for g in found.hosts[1].gpus} == {("h100", True)}
    with pytest.raises(UsageError, match="without a type"):
        read("NodeName=x Gres=gpu:1g.10gb:7")


def test_sinfo_with_bars_and_without_its_gres() -> None:
    assert [h.name for h in read("NODELIST|GRES\ng[1-2]|gpu:h100:8\n").hosts] == ["g1", "g2"]
    for text in ("PARTITION AVAIL NODES NODELIST\ngpu* up 4 g[1-4]\n", "g1 gpu:h100:8\ng2 (null)\n", "g1|gpu:a100:2\n"):
        with pytest.raises(UsageError, match="sinfo") as caught:
            read_inventory(text, "nodes.txt")
        assert "%N %G" in caught.value.hint


def test_a_kubernetes_list_without_nodes() -> None:
    for items in ([], [{"kind": "Pod", "metadata": {"name": "x"}}]):
        with pytest.raises(UsageError, match="lists no node"):
            read_inventory(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}), "x")


def test_node_lists() -> None:
    assert list(expand("a[01-03,07]-x,b")) == ["a01-x", "a02-x", "a03-x", "a07-x", "b"]
    for text in ("a[1", "a[1-]", "a[-1]", "a[1-2-3]", "a[1-99999999]", "a]"):
        with pytest.raises(UsageError):
            list(expand(text))


def test_other_files_are_not_taken_for_a_cluster() -> None:
    for text in (
        "",
        "hosts:\n- name: a\n",
        "- name: a\n  driver: none\n",
        "{}",
        "[]",
        "{",
        '{"schema": 1, "gpus": []}',
    ):
        assert read_inventory(text, "x") is None


# --- through --fleet ------------------------------------------------------------------------------------------------


def test_a_cluster_is_a_fleet(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(cluster(A100, LOGIN))
    (host,) = Targets(fleet=path).read()
    assert (host.name, host.driver, host.gpus[0].sm) == ("gpu-a", "535.161.08", "8.0")
    path.write_text(cluster(LOGIN))
    with pytest.raises(NoTargetError, match="none of its 1 nodes"):
        Targets(fleet=path).read()
    (cpu,) = Targets(fleet=path, driver="none").read()
    assert not cpu.has_gpu


def test_slurm_asks_for_the_driver(tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text(SCONTROL)
    with pytest.raises(UsageError, match=r"Slurm knows no driver.*gpu01, gpu02") as caught:
        Targets(fleet=path).read()
    assert "--driver" in caught.value.hint and "--host" in caught.value.hint and caught.value.exit_code == 2
    first, second = Targets(fleet=path, driver="550.54.15").read()
    assert first.driver == second.driver == "550.54.15" and (first.gpus[0].sm, second.gpus[0].sm) == ("8.0", "7.0")


def test_records_of_the_nodes_join_what_slurm_says(tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text(SCONTROL)
    for name in ("gpu01", "gpu02"):
        folder = tmp_path / name
        folder.mkdir()
        row = f"0, Tesla V100-SXM2-32GB, 470.{name[-1]}2.03, 7.0, 32510, 1, [N/A], GPU-0d5a6c31, 00000000:00:03.0\n"
        (folder / "nvidia-smi-query.csv").write_text(row)
    with pytest.raises(UsageError, match="gpu02"):
        Targets(fleet=path, host=[tmp_path / "gpu01"]).read()
    hosts = Targets(fleet=path, host=[tmp_path / "gpu01", tmp_path / "gpu02"]).read()
    assert [(h.name, h.driver) for h in hosts] == [("gpu01", "470.12.03"), ("gpu02", "470.22.03")]


def test_a_node_that_is_left_out_or_recorded_needs_no_facts(tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text("NodeName=gpu01 Gres=gpu:v100:2\nNodeName=gpu02 Gres=gpu:4\nNodeName=gpu03 Gres=gpu:z9:4\n")
    (host,) = Targets(fleet=path, driver="550.54.15", exclude=["gpu02", "gpu03"]).read()
    assert host.name == "gpu01"
    folder = tmp_path / "gpu02"
    folder.mkdir()
    row = "0, Tesla V100-SXM2-32GB, 470.12.03, 7.0, 32510, 1, [N/A], GPU-0d5a6c31, 00000000:00:03.0\n"
    (folder / "nvidia-smi-query.csv").write_text(row)
    (host,) = Targets(fleet=path, host=[folder], exclude=["gpu01", "gpu03"]).read()
    assert (host.name, host.driver) == ("gpu02", "470.12.03")
    with pytest.raises(UsageError, match="no such host"):
        Targets(fleet=path, driver="550.54.15", exclude=["gpu02", "nope"]).read()
    with pytest.raises(UsageError, match="leaves no host"):
        Targets(fleet=path, driver="550.54.15", exclude=["gpu01", "gpu02", "gpu03"]).read()


def test_unknown_products_are_named_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    rows = [
        node(f"n{i}", gpu_product=f"NVIDIA-Z{i}00X", cuda_driver_major="550", cuda_driver_minor="54") for i in (7, 8, 9)
    ]
    path.write_text(cluster(*rows))
    with pytest.raises(UsageError) as caught:
        Targets(fleet=path).read()
    assert all(f"Z{i}00X" in caught.value.cause and f"n{i}" in caught.value.cause for i in (7, 8, 9))


# --- whatever stands in such files ------------------------------------------------------------------------------------

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=12,
)


def total(text: str) -> None:
    """Reading gives hosts, None, or a message: never another exception."""
    try:
        found = read_inventory(text, "x")
    except EnvforgeError as error:
        assert error.exit_code == 2 and error.cause
        return
    if found is not None:
        assert all(len(host.gpus) > 0 for host in found.hosts)


_label = st.sampled_from(
    [
        f"nvidia.com/{key}"
        for key in ("gpu.product", "gpu.count", "gpu.memory", "gpu.compute.major", "gpu.compute.minor")
    ]
    + [f"nvidia.com/cuda.driver{key}" for key in (".major", ".minor", ".rev", "-version.full", "-version.major")]
    + ["kubernetes.io/arch"]
)


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"kind": st.just("Node")},
            optional={
                "metadata": _values
                | st.fixed_dictionaries(
                    {
                        "name": st.text(max_size=8),
                        "labels": st.dictionaries(_label, _values | st.text("0123456789.-AZ")),
                    }
                ),
                "status": _values | st.fixed_dictionaries({"capacity": _values, "nodeInfo": _values}),
            },
        ),
        max_size=3,
    )
)
def test_no_kubernetes_listing_breaks_the_reader(items: list[dict[str, Any]]) -> None:
    total(json.dumps({"apiVersion": "v1", "kind": "NodeList", "items": items}))


@settings(deadline=None)
@given(st.text(alphabet="NodeName=Gres gpu:a100(S0-1),[]\n\t_-.é", max_size=120), _values)
def test_no_slurm_listing_breaks_the_reader(text: str, value: object) -> None:
    total("NodeName=" + text)
    total("NODELIST GRES\n" + text)
    total(json.dumps({"nodes": [value, {"name": "a", "gres": value, "features": value}], "meta": {}}))
    total(json.dumps({"sinfo": [value, {"nodes": {"nodes": [value, text]}, "gres": value}]}))
