"""The rule file: faults are told with their line, the cache costs nothing but time, the advice keeps its manners."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envforge.diagnose import rules as module
from envforge.diagnose.facts import PREDICATES
from envforge.diagnose.model import Rules
from envforge.diagnose.rules import DATA, load_rules
from envforge.errors import DataError

# What a fix must never say, also not as a warning: whoever skims it does it.
FORBIDDEN = (
    "UNSLOTH_NO_TRITON", "gpu-reset", "nvidia-smi -r", "--user root", "--user 0", "-u root", "-u 0", "chmod 777",
    "NVIDIA_DISABLE_REQUIRE", "weights_only=False", "torch==2.5", "kill -9", "killall", "pkill", "fuser -k",
    "apt install cuda", "apt-get install cuda", "conda install cudatoolkit", "--privileged", "rm -rf /",
    "verify=False", "--trusted-host", "sudo rm",
)  # fmt: skip

_IDS = """apptainer-host-libs-glibc benign-warning bf16-unsupported-gpu bitsandbytes-cuda-binary-missing build-disk-full
build-oom cache-not-writable companion-version-missing container-cuda-require container-lost-device-cgroup
container-toolkit-missing cpu-only-torch cublas-not-initialized cuda-compat-on-geforce cuda-home-missing
cuda-init-failed cuda-lib-shadowed cuda-unknown-error cxx11-abi-mismatch dependency-conflict
device-assert-embedding-index device-assert-index device-assert-label-range device-assert-position-index
device-mismatch docker-daemon-cannot-see-driver driver-library-mismatch driver-missing driver-too-old dtype-mismatch
enroot-nvidia-hook fabric-manager flash-attn-arch hardware-ecc hardware-gpu-lost invalid-tokenized-input
k8s-cdi-generation k8s-no-gpu-capacity kernel-module-flavour lora-not-training memory-creep nan-grad-fp16 nan-loss
nccl-timeout no-kernel-image no-nvidia-gpu-on-host numpy-abi oom-capacity oom-fragmentation oom-other-process
ptx-newer-than-driver python-package-missing python-package-skew remote-code-vs-transformers shm-too-small
tokenizers-too-old toolkit-torch-major-mismatch torch-load-guard torch-torchvision-mismatch torchao-cpp-skipped
triton-compile-failed triton-driver-or-ptxas-mismatch triton-no-compiler triton-no-python-headers
triton-ptxas-too-old triton-shared-memory vgpu-unlicensed visible-devices-uuid-unsupported wrong-local-build
xformers-arch-cap xformers-build-mismatch host-oom-kill time-limit preempted node-fail image-pull quota hub-auth
hub-unreachable tls-ca nccl-interface"""
IDS = _IDS.split()


@pytest.fixture(scope="module")
def rules() -> Rules:
    return load_rules()


def test_documented_ids_exist(rules: Rules) -> None:
    assert set(IDS) <= {rule.id for rule in rules.rules}


def test_fixes_keep_their_manners(rules: Rules) -> None:
    for rule in rules.rules:
        for case in rule.cases:
            for text in (text for step in case.fixes for text in step):
                for word in FORBIDDEN:
                    assert word.lower() not in text.lower(), (rule.id, text)


def test_every_case_says_what_to_do(rules: Rules) -> None:
    for rule in rules.rules:
        for case in rule.cases:
            assert case.cause and case.fixes, rule.id
            # The last wording of each must need nothing that may be unknown, or the pattern itself must give it.
            groups = {name for pattern in case.patterns for name in re.findall(r"\(\?P<(\w+)>", pattern.re)}
            if not groups and not case.check and not case.tracker:
                assert not re.search(r"\{\w+\}", case.cause[-1]) or case.conditions, (rule.id, case.cause[-1])


def test_not_fatal_is_never_certain(rules: Rules) -> None:
    for rule in rules.rules:
        for case in rule.cases:
            if rule.severity != "fatal":
                assert case.confidence != "certain"
                assert all(row.to != "certain" for row in case.adjust), rule.id


def test_consequences_make_no_circle(rules: Rules) -> None:
    edges = {rule.id: set(rule.consequence_of) - {"*"} for rule in rules.rules}
    for start in edges:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            step = todo.pop()
            assert step != start, start
            if step not in seen:
                seen.add(step)
                todo += edges[step]


def test_every_pattern_compiles_and_names_its_literal(rules: Rules) -> None:
    patterns = [p for rule in rules.rules for case in rule.cases for p in case.patterns]
    patterns += [p for several in rules.signals.values() for p in several]
    for pattern in patterns:
        re.compile(pattern.re, re.IGNORECASE)
        assert 3 <= len(pattern.literal) < 200 and pattern.literal == pattern.literal.lower(), pattern.re


HEAD = """\
schema: 1
next: ["look at the log again"]
signals: {seen: ["something seen"]}
rules:
- id: a-rule
  title: "A title that is long enough"
  owner: code
  retryable: false
  source: "a document"
  fixes: ["do this and that"]
  cases:
"""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("  - {patterns: ['bro(ken'], confidence: likely, cause: 'why it is so'}\n", "is not a regular expression"),
        ("  - {patterns: ['a|b here'], confidence: likely, cause: 'why it is so'}\n", "split it"),
        ("  - {patterns: ['plain text'], confidence: sure, cause: 'why it is so'}\n", "certain, likely, possible"),
        (
            "  - {patterns: ['plain text'], if: [nothing], confidence: likely, cause: 'why it is so'}\n",
            "unknown condition",
        ),
        (
            "  - {patterns: ['plain text'], check: no-check, confidence: likely, cause: 'why it is so'}\n",
            "unknown check",
        ),
        ("  - {tracker: none-such, confidence: likely, cause: 'why it is so'}\n", "unknown tracker"),
        ("  - {confidence: likely, cause: 'why it is so'}\n", "either patterns or a tracker"),
        ("  - {patterns: ['plain text'], confidence: likely, cause: 'why it is so', colour: red}\n", "unknown field"),
        (
            "  - {patterns: ['plain text'], confidence: likely, cause: 'why it is so'}\n  hidden_by: [b-rule]\n",
            "no rule",
        ),
    ],
)
def test_faults_are_told(tmp_path: Path, case: str, said: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(HEAD + case)
    with pytest.raises(DataError) as caught:
        load_rules(path, use_cache=False)
    assert said in caught.value.cause
    assert "rules.yaml:" in caught.value.cause


def test_cache_gives_the_same_and_survives_damage(tmp_path: Path) -> None:
    load_rules.cache_clear()
    first = load_rules(DATA, cache=tmp_path)
    (stored,) = tmp_path.glob("*.json")
    load_rules.cache_clear()
    assert load_rules(DATA, cache=tmp_path) == first
    stored.write_text("{ broken")
    load_rules.cache_clear()
    assert load_rules(DATA, cache=tmp_path) == first
    assert stored.read_text() != "{ broken"
    load_rules.cache_clear()


def test_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_rules.cache_clear()
    load_rules(DATA, cache=tmp_path)
    load_rules.cache_clear()

    def never(*_: object) -> None:
        raise AssertionError("parsed although it was cached")

    monkeypatch.setattr(module, "_parse", never)
    load_rules(DATA, cache=tmp_path)
    load_rules.cache_clear()


def test_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    load_rules.cache_clear()
    assert load_rules(DATA, cache=blocked / "below").rules
    load_rules.cache_clear()


def test_documentation_lists_every_id(rules: Rules) -> None:
    text = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    for rule in rules.rules:
        assert f"| {rule.id} | {rule.owner} | {'yes' if rule.retryable else 'no'} | {rule.title} |" in text, rule.id


def test_patterns_look_a_bounded_way_ahead(rules: Rules) -> None:
    """`.*` after a text that a line repeats costs the square of the line; bounded ones do not."""
    patterns = [p for rule in rules.rules for case in rule.cases for p in case.patterns]
    patterns += [p for several in rules.signals.values() for p in several]
    for pattern in patterns:
        assert not re.search(r"\[\^\\n\][*+]", pattern.re), pattern.re
        assert not re.search(r"(?<!\\)\.[*+]", re.sub(r"\[[^\]]+\]", "[]", pattern.re)), pattern.re


def test_every_signal_and_predicate_is_asked(rules: Rules) -> None:
    terms = [t for rule in rules.rules for case in rule.cases for t in case.conditions]
    terms += [t for rule in rules.rules for case in rule.cases for row in case.adjust for t in row.conditions]
    asked = {word.lstrip("!") for term in terms for word in term.split("|")}
    assert not (set(rules.signals) | set(PREDICATES)) - asked
