"""Fleets: the fewest plans against brute force, what more plans gain, and hosts that can share nothing."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envforge.matrix.load import load_matrix
from envforge.matrix.model import Matrix
from envforge.resolver.constraints import Options
from envforge.resolver.fleet import EXACT_KINDS, Cover, cover, fewest, fleet_plans, fleet_text, kinds
from envforge.resolver.hosts import Host, known, make_host
from envforge.resolver.request import parse_request
from envforge.resolver.resolve import Wish, resolve

V100 = ("v100", "550.54.15", ["Tesla V100-SXM2-32GB"])
H100 = ("h100", "580.82.07", ["NVIDIA H100 80GB HBM3"])
B200 = ("b200", "580.82.07", ["NVIDIA B200"])
A100_OLD = ("a100", "535.104.05", ["NVIDIA A100-SXM4-80GB"])
P100 = ("p100", "470.182.03", ["Tesla P100-PCIE-16GB"])
LOGIN = ("login", "none", [])


@cache
def matrix() -> Matrix:
    return load_matrix()


def host(row: tuple[str, str, list[str]], arch: str = "x86_64", count: int = 1) -> Host:
    return known(make_host(row[0], row[1], row[2], arch=arch, count=count), matrix())


def wish(requests: list[str], *hosts: Host, **options: str) -> Wish:
    return Wish(tuple(parse_request(r) for r in requests), hosts, Options(**options))  # type: ignore[arg-type]


def named(found: Cover) -> list[list[str]]:
    return [sorted(h.name for h in part.hosts) for part in found.parts]


def test_hosts_that_differ_in_nothing_stand_together() -> None:
    assert [len(group) for group in kinds([host(V100), host(("other", *V100[1:])), host(H100)])] == [2, 1]


def test_one_v100_does_not_drag_the_h100s_down_unseen() -> None:
    found = cover(matrix(), wish(["torch"], host(V100), host(H100, count=8)))
    assert len(found.parts) == 1 and found.exact and not found.why
    assert found.parts[0].plan.variant == "cu126"
    wider = {h.name: part for part in found.ways[1] for h in part.hosts}
    assert wider["h100"].plan.variant.startswith("cu13") and wider["v100"].plan.variant == "cu126"
    assert any("torch" in gain for gain in wider["h100"].gains) and not wider["v100"].gains


def test_the_hosts_of_the_oldest_driver_may_be_resolved_apart() -> None:
    answer = resolve(matrix(), wish(["unsloth"], host(P100), host(H100, count=8)))
    assert answer.conflict is not None
    changes = [fix.change for fix in answer.conflict.fixes]
    assert "resolve the hosts with driver 470.182.03 apart: --exclude p100" in changes


def test_each_gpu_is_judged_by_the_driver_of_its_own_host() -> None:
    # B200 needs branch 570, which its own host has; the A100 beside it has 535. One CUDA 12.8 build runs on both.
    found = cover(matrix(), wish(["torch"], host(A100_OLD), host(B200)))
    assert len(found.parts) == 1 and found.parts[0].plan.variant in ("cu128", "cu129")
    old = resolve(matrix(), wish(["torch"], host(("b200", "550.54.15", ["NVIDIA B200"])), host(H100)))
    assert old.conflict is not None and "570" in old.conflict.text


def test_why_they_cannot_share_is_said_and_names_both() -> None:
    found = cover(matrix(), wish(["torch>=2.11"], host(V100), host(B200)))
    assert named(found) == [["v100"], ["b200"]]
    assert "V100" in found.why and "B200" in found.why


def test_hosts_that_no_plan_serves_are_named_with_the_reason() -> None:
    found = cover(matrix(), wish(["vllm"], host(P100), host(H100)))
    assert named(found) == [["h100"]] and [h.name for lost in found.lost for h in lost.hosts] == ["p100"]
    assert "7.0" in found.lost[0].text


@pytest.mark.parametrize("others", [[host(H100, "aarch64")], [host(LOGIN)]])
def test_other_wheels_altogether_are_a_conflict_and_not_a_search(others: list[Host]) -> None:
    asked = wish(["torch"], host(H100), *others)
    answer = resolve(matrix(), asked)
    assert answer.conflict is not None and "--exclude" in answer.conflict.fixes[0].change
    assert len(cover(matrix(), asked).parts) == 2
    if not others[0].has_gpu:
        assert resolve(matrix(), wish(["torch"], host(H100), *others, variant="cpu")).plan is not None


def test_the_text_is_a_table_for_each_way() -> None:
    lines = fleet_text(fleet_plans(matrix(), wish(["torch"], host(V100), host(H100, count=8))))
    text = "\n".join(lines)
    assert (
        lines[0] == "one plan for all hosts:" and "2 plans" in text and "h100 (8 hosts)" in text and "gains: " in text
    )
    lost = "\n".join(fleet_text(fleet_plans(matrix(), wish(["vllm"], host(P100), host(H100)))))
    assert "no plan serves p100" in lost


# --- the fewest sets, against brute force ---------------------------------------------------------------------------


def partitions(items: list[int]) -> list[list[int]]:
    if not items:
        return [[]]
    found = []
    for rest in partitions(items[1:]):
        found.append([1 << items[0], *rest])
        found += [[*rest[:n], part | 1 << items[0], *rest[n + 1 :]] for n, part in enumerate(rest)]
    return found


@settings(deadline=None)
@given(st.integers(1, 6), st.data())
def test_the_fewest_sets_are_what_brute_force_finds(count: int, data: st.DataObject) -> None:
    every = [a | b for a, b in combinations([1 << i for i in range(count)], 2)] or [0]
    wider = [sum(1 << i for i in trio) for trio in combinations(range(count), 3)]
    bad = data.draw(st.sets(st.sampled_from([*every, *wider] or [0])))
    bad.discard(0)

    def shares(part: int) -> bool:
        return not any(part & other == other for other in bad)

    found = fewest(list(range(count)), shares, exact=True)
    assert all(shares(part) for part in found) and sum(found) == (1 << count) - 1
    best = min(len(parts) for parts in partitions(list(range(count))) if all(shares(part) for part in parts))
    assert len(found) == best
    greedy = fewest(list(range(count)), shares, exact=False)
    assert all(shares(part) for part in greedy) and sum(greedy) == (1 << count) - 1 and len(greedy) >= best


def test_real_fleets_against_brute_force() -> None:
    rows = [host(V100), host(H100), host(B200), host(A100_OLD)]
    asked = ["torch>=2.11"]
    ok = {
        part: resolve(matrix(), wish(asked, *(rows[i] for i in range(4) if part >> i & 1))).plan is not None
        for part in range(1, 16)
    }
    usable = [i for i in range(4) if ok[1 << i]]
    best = min(len(p) for p in partitions(usable) if all(ok[part] for part in p))
    assert len(cover(matrix(), wish(asked, *rows)).parts) == best


def test_above_the_exact_limit_the_answer_says_so() -> None:
    rows = [host((f"n{i}", f"580.{i}.15", ["NVIDIA L4"])) for i in range(65, 65 + EXACT_KINDS)]
    one = cover(matrix(), wish(["torch"], *rows, host(H100)))
    assert one.exact and len(one.parts) == 1  # fewer than one there cannot be
    two = cover(matrix(), wish(["torch>=2.11"], host(V100), host(B200), *rows))
    assert not two.exact and len(two.parts) == 2
    assert "greedily" in "\n".join(
        fleet_text(fleet_plans(matrix(), wish(["torch>=2.11"], host(V100), host(B200), *rows)))
    )
