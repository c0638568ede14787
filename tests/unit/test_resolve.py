"""The resolver on the real matrix: answers, tiers, coherence, and explanations that hold."""

from __future__ import annotations

import json
from functools import cache

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envforge.matrix.load import load_matrix
from envforge.matrix.model import Matrix
from envforge.matrix.releases import load_releases
from envforge.resolver import fixes
from envforge.resolver.check import judge
from envforge.resolver.constraints import Options, encode
from envforge.resolver.explain import Conflict
from envforge.resolver.hosts import known, make_host
from envforge.resolver.passes import search
from envforge.resolver.plan import Plan, load_plan
from envforge.resolver.request import parse_request
from envforge.resolver.resolve import Answer, Wish, ranks, resolve
from envforge.resolver.solve import Problem, Solution, leaves, solve

XTUNER_STORY = [
    "torch==2.1.2",
    "torchvision==0.16.2",
    "torchaudio==2.1.2",
    "transformers==4.36.2",
    "bitsandbytes==0.41.2.post2",
    "deepspeed==0.12.3",
    "xtuner",
]


@cache
def matrix() -> Matrix:
    return load_matrix()


def wish(requests: list[str], driver: str = "none", gpus: tuple[str, ...] = (), **options: object) -> Wish:
    as_of = options.pop("as_of", None)
    glibc = options.pop("glibc", None)
    host = known(make_host("h", driver, gpus, glibc), matrix())  # type: ignore[arg-type]
    return Wish(tuple(parse_request(r) for r in requests), (host,), Options(**options), as_of)  # type: ignore[arg-type]


def ask(requests: list[str], driver: str = "none", gpus: tuple[str, ...] = (), **options: object) -> Answer:
    return resolve(matrix(), wish(requests, driver, gpus, **options))


def plan(requests: list[str], driver: str = "none", gpus: tuple[str, ...] = (), **options: object) -> Plan:
    answer = ask(requests, driver, gpus, **options)
    assert answer.plan is not None, answer.conflict and answer.conflict.text
    return answer.plan


def conflict(requests: list[str], driver: str = "none", gpus: tuple[str, ...] = (), **options: object) -> Conflict:
    answer = ask(requests, driver, gpus, **options)
    assert answer.conflict is not None
    return answer.conflict


def fits(version: str, specifier: str) -> bool:
    return Version(version) in SpecifierSet(specifier, prereleases=True)


def test_the_xtuner_story_comes_out_coherent() -> None:
    answer = plan(XTUNER_STORY, "535.104.05", ("sm_80",), pythons=("3.10",))
    pins = answer.pins
    assert fits(pins["numpy"], "<2") and fits(pins["peft"], "<=0.13.2") and fits(pins["accelerate"], ">=0.21,<1.0")
    assert fits(pins["pyarrow"], "<26") and fits(pins["setuptools"], "<82") and "scipy" in pins
    assert answer.python == "3.10" and answer.as_of is not None and answer.as_of < "2024-03"
    assert "torch" in answer.undated


def test_a_cap_is_not_escaped_by_an_old_release() -> None:
    found = conflict(["unsloth", "torch==2.15.0"], "580.65.06", ("sm_80",))
    assert "unsloth" in found.text and "torch" in found.text
    free = plan(["unsloth", "torch==2.15.0"], "580.65.06", ("sm_80",), allow_uncapped=True)
    assert Version(free.pins["unsloth"]) < Version("2026.10")


@pytest.mark.parametrize(
    ("driver", "torch", "variant", "tier"),
    [
        ("550.54.15", "2.7.1", "cu126", "minor"),
        ("535.104.05", "2.6.0", "cu124", "minor"),
        ("565.57.01", "2.6.0", "cu126", "native"),
        ("580.82.07", "2.14.1", "cu130", "native"),
        ("470.182.03", "2.7.1", "cu118", "minor"),
    ],
)
def test_variant_and_tier(driver: str, torch: str, variant: str, tier: str) -> None:
    answer = plan([f"torch=={torch}"], driver, ("sm_80",))
    assert (answer.variant, answer.tier) == (variant, tier)


def test_the_minor_tier_says_what_does_not_work_there() -> None:
    answer = plan(["torch==2.7.1"], "550.54.15", ("sm_80",))
    assert any(w.id == "minor-tier" and "PTX" in w.text for w in answer.warnings)


def test_ptx_does_not_count_in_the_minor_tier() -> None:
    # torch 2.9 cu130 has sm_100 and sm_120 code and 12.0 PTX; a later capability could only be compiled by the driver.
    newer = conflict(["torch==2.9.1"], "575.57.08", ("sm_110",), variant="cu128")
    assert "sm_110" in newer.text


def test_forward_compatibility_is_for_data_centre_gpus_only() -> None:
    centre = plan(["torch>=2.15"], "535.230.02", ("NVIDIA A100-SXM4-80GB",))
    assert centre.tier == "forward" and any(w.id == "forward-tier" for w in centre.warnings)
    assert "535" in conflict(["torch>=2.15"], "535.230.02", ("NVIDIA GeForce RTX 3090",)).text
    assert "535" in conflict(["torch>=2.15"], "535.230.02", ("sm_80",)).text  # unnamed: nobody knows that it may


def test_a_plan_for_cuda_compat_runs_on_the_driver_that_it_was_made_for() -> None:
    """Preflight, proof and jobs hold nodes against the floor: the toolkit's own would refuse every host of the plan."""
    made = plan(["torch>=2.15"], "535.230.02", ("NVIDIA A100-SXM4-80GB",))
    assert (made.tier, made.target.driver_floor) == ("forward", "535.230.02")


def test_reasons_claim_no_date_for_a_pin() -> None:
    made = plan(["transformers==4.46.0", "peft"], "550.54.15", ("NVIDIA A100-SXM4-80GB",))
    assert not any("was current on" in reason.text for reason in made.reasons["transformers"])
    assert any("was current on" in reason.text for reason in made.reasons["peft"])


def test_a_cpu_plan_has_no_cuda_parts() -> None:
    answer = plan(["torch==2.13.0", "transformers==5.17.0"])
    assert (answer.variant, answer.tier, answer.cuda, answer.target.driver_floor) == ("cpu", "cpu", None, None)
    assert "triton" not in answer.pins


def test_open_packages_follow_the_date_of_the_pinned_one() -> None:
    answer = plan(["transformers==4.44.2", "torch==2.13.0", "peft", "datasets"])
    assert answer.as_of == "2024-09-21"
    assert answer.pins["peft"] == "0.12.0" and fits(answer.pins["datasets"], "<3.1")
    assert "setuptools" in answer.undated  # torch 2.13 needs one from after the date


@pytest.mark.parametrize(
    ("version", "below"), [("2025.10.1", "2025.12"), ("2026.3.11", "2026.5"), ("2024.12.4", "2025.2")]
)
def test_the_companion_of_a_pinned_trainer_is_of_its_time(version: str, below: str) -> None:
    """unsloth-zoo has no upper bound; of another year it drags trl and transformers along."""
    for requests in ([f"unsloth=={version}"], [f"unsloth=={version}", "unsloth-zoo"]):
        pins = plan(requests, "550.54.15", ("NVIDIA A100-SXM4-80GB",)).pins
        assert fits(pins["unsloth-zoo"], f"<{below}"), pins


def test_torchao_goes_with_a_torch_that_it_can_be_imported_beside() -> None:
    gpu = ("NVIDIA H100 80GB HBM3",)
    for torch, torchao in (("2.9.1", "0.18.0"), ("2.5.1", "0.13.0")):
        assert "torchao" in conflict([f"torchao=={torchao}", f"torch=={torch}"], "580.82.07", gpu).text
    pins = plan(["unsloth==2026.10.9", "torch==2.6.0", "peft"], "580.82.07", gpu).pins
    assert fits(pins["torchao"], "<0.18"), pins


def test_the_first_vllm_wheels_go_with_the_torch_that_they_are_linked_to() -> None:
    """They declare no upper bound: torch 2.6 got a vllm of 2023 that does not load, not the one made for it."""
    assert fits(plan(["vllm", "torch==2.6.0"], "550.54.15", ("NVIDIA A100-SXM4-80GB",)).pins["vllm"], ">=0.8,<0.9")
    for requests in (["vllm==0.2.5", "torch==2.2.2"], ["vllm==0.2.2", "torch==2.0.1"], ["vllm==0.1.7", "torch==2.1.2"]):
        assert "vllm" in conflict(requests, "550.54.15", ("NVIDIA A100-SXM4-80GB",)).text


def test_wheels_that_are_linked_to_another_cuda_are_told() -> None:
    def told(requests: list[str], driver: str, gpus: tuple[str, ...] = ()) -> set[str]:
        return {warning.id for warning in plan(requests, driver, gpus).warnings}

    assert "xformers-build-mismatch" in told(["xformers"], "470.57.02", ("NVIDIA A100-SXM4-80GB",))
    assert "xformers-build-mismatch" not in told(["xformers"], "550.54.15", ("NVIDIA A100-SXM4-80GB",))
    assert "vllm-cpu" in told(["vllm"], "none") and "vllm-cpu" not in told(["vllm"], "580.82.07", ("NVIDIA B200",))


def test_a_trainer_that_its_host_holds_back_has_a_companion_of_its_time() -> None:
    pins = plan(["unsloth"], "550.54.15", ("NVIDIA A100-SXM4-80GB",), glibc="2.17").pins
    assert pins["unsloth"].startswith("2025.") and pins["unsloth-zoo"].startswith("2025.")


def test_a_date_that_the_user_names_is_for_trainers_too() -> None:
    pins = plan(["unsloth"], "550.54.15", ("NVIDIA A100-SXM4-80GB",), as_of="2025-03-20").pins
    assert pins["unsloth"].startswith("2025.3.") and pins["unsloth-zoo"].startswith("2025.3.")
    assert plan(["unsloth"], as_of="today").pins["unsloth"].startswith("2026.")


def test_a_leaf_pin_sets_no_date() -> None:
    answer = plan(["torch", "transformers", "numpy==1.26.4"])  # numpy 1.26.4 is of February 2024
    assert answer.pins["numpy"] == "1.26.4" and answer.as_of is not None and answer.as_of > "2026"


def test_the_answer_does_not_depend_on_the_order_of_requests() -> None:
    forward, backward = plan(XTUNER_STORY, "535.104.05", ("sm_80",)), plan(XTUNER_STORY[::-1], "535.104.05", ("sm_80",))
    assert forward.pins == backward.pins and forward.variant == backward.variant


def test_a_plan_survives_its_json() -> None:
    answer = plan(["unsloth"], "550.54.15", ("NVIDIA A100-SXM4-80GB",))
    assert load_plan(answer.dumps()) == answer and load_plan(answer.dumps()).hash() == answer.hash()
    assert json.loads(answer.dumps())["schema"] == 1


CONFLICTS = [
    (["torch>=2.15"], "535.230.02", ("NVIDIA GeForce RTX 3090",), {}),
    (["torch==2.7.1"], "570.124.06", ("sm_70",), {"variant": "cu128"}),
    (["torch>=2.11"], "580.82.07", ("sm_70", "sm_120"), {}),
    (["transformers>=5", "peft==0.17.1"], "none", (), {}),
    (["torch==2.2.2", "numpy>=2"], "none", (), {}),
    (["torch==2.9.1", "torchvision==0.23.0"], "580.126.09", ("sm_89",), {}),
    (["torch==2.8.0"], "580.126.09", ("sm_89",), {"pythons": ("3.14",)}),
    (["flash-attn>=2"], "535.104.05", ("Tesla T4",), {}),
    (["vllm==0.15.1"], "580.126.09", ("sm_89",), {"glibc": "2.28"}),
    (["unsloth", "torch==2.1.2"], "580.65.06", ("sm_80",), {}),
    (["torch==2.99.0"], "580.65.06", ("sm_80",), {}),
    (["bitsandbytes==0.47.0", "torch==2.9.1"], "580.126.09", ("sm_89",), {"variant": "cu130"}),
]


@pytest.mark.parametrize(("requests", "driver", "gpus", "options"), CONFLICTS)
def test_the_facts_named_suffice_and_each_is_needed(
    requests: list[str], driver: str, gpus: tuple[str, ...], options: dict[str, object]
) -> None:
    asked = wish(requests, driver, gpus, **options)
    enc = encode(matrix(), asked.requests, asked.hosts, asked.options)
    first = solve(Problem(enc.domains, enc.rows, ranks(enc)))
    assert not isinstance(first, Solution)
    core = fixes.core_of(enc, leaves(first))
    groups = {fixes.fact_key(row.origin) for row in core}
    whole = solve(Problem(enc.domains, list(core), ranks(enc)))
    assert not isinstance(whole, Solution)
    for left_out in groups:
        rest = [row for row in core if fixes.fact_key(row.origin) != left_out]
        assert isinstance(solve(Problem(enc.domains, rest, ranks(enc))), Solution), left_out


@pytest.mark.parametrize(("requests", "driver", "gpus", "options"), CONFLICTS)
def test_explanations_speak_of_packages_and_fixes_exist(
    requests: list[str], driver: str, gpus: tuple[str, ...], options: dict[str, object]
) -> None:
    found = conflict(requests, driver, gpus, **options)
    assert found.parties and found.statements
    for internal in ("torch-variant", "host:", "mask", "row"):
        assert internal not in found.text.replace("narrow", "").replace("throw", "").replace("grow", "")
    for fix in found.fixes:
        assert "then" in fix.text or "leave" in fix.change


def test_a_build_that_only_a_cpu_could_use_says_that_there_is_a_gpu() -> None:
    host = known(make_host("h", "560.35.05", ("NVIDIA GH200 480GB",), arch="aarch64"), matrix())
    answer = resolve(matrix(), Wish((parse_request("torch==2.4.1"),), (host,)))
    assert answer.conflict is not None and "GPU" in answer.conflict.text


def test_a_fix_of_the_request_really_solves() -> None:
    for requests, driver, gpus, options in CONFLICTS:
        for fix in conflict(requests, driver, gpus, **options).fixes:
            name = fix.change.split("<")[0].split("=")[0].split(">")[0]
            if name not in {parse_request(r).name for r in requests} or " and " in fix.change:
                continue
            changed = [r for r in requests if parse_request(r).name != name] + [fix.change]
            assert ask(changed, driver, gpus, **options).plan is not None, (requests, fix.change)


@pytest.mark.parametrize("requests", [["unsloth"], ["xtuner"], ["torch", "transformers", "peft", "trl"], XTUNER_STORY])
@pytest.mark.parametrize("target", [("550.54.15", ("sm_80",)), ("580.95.05", ("sm_120",)), ("none", ())])
def test_every_answer_stands_before_the_judge(requests: list[str], target: tuple[str, tuple[str, ...]]) -> None:
    asked = wish(requests, *target)
    answer = resolve(matrix(), asked)
    if answer.plan is None:
        assert answer.conflict is not None
        return
    verdict = judge(matrix(), answer.plan.pins, asked.hosts, answer.plan.python, answer.plan.variant)
    assert verdict.ok and not verdict.missing and not verdict.unknown, verdict


def test_the_judge_refuses_what_breaks() -> None:
    hosts = wish(["torch"], "550.54.15", ("sm_80",)).hosts
    assert not judge(matrix(), {"torch": "2.1.2", "numpy": "2.0.0"}, hosts).ok
    assert not judge(matrix(), {"torch": "2.15.0"}, hosts).ok
    assert judge(matrix(), {"torch": "2.6.0", "numpy": "2.1.0"}, hosts, "3.11", "cu124").ok


def test_every_reason_names_its_source() -> None:
    found = plan(["unsloth"], "550.54.15", ("sm_80",))
    assert found.extras.get("fsspec") == ("http",), "an extra is in the answer"
    for name, lines in found.reasons.items():
        assert all(line.source for line in lines), (name, lines)


def test_a_hundred_lines_in_the_way_cost_a_bounded_number_of_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [row.version for row in load_releases("transformers")]
    calls = 0

    def counted(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        return search(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fixes, "search", counted)
    found = conflict([f"transformers!={version}" for version in known])
    assert found.fixes and len(found.fixes) <= fixes.MAX_FIXES
    assert len(known) > 100 and calls <= fixes.MAX_WAYS
