"""The policy's parts that need no torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from envforge.verify import NotReadyError, TrainingPolicy, gpu_precheck, length_report
from envforge.verify.policy import SafeCollator


class WordTokenizer:
    """Stands in for a tokenizer: one token per word, the id is the word's length."""

    pad_token_id = None
    eos_token_id = 9

    def __call__(self, text: str, truncation: bool = False, max_length: int | None = None) -> dict[str, list[int]]:
        ids = [len(word) for word in text.split()]
        return {"input_ids": ids[:max_length] if truncation else ids}


def test_the_stories_defaults() -> None:
    policy = TrainingPolicy()
    assert (policy.max_length, policy.batch_size, policy.accumulation, policy.max_grad_norm) == (1024, 1, 8, 1.0)
    careful = policy.cautious()
    assert careful.max_grad_norm == 0.3 and careful.learning_rate == pytest.approx(5e-5)
    assert careful.warmup_steps > 0 and careful.scheduler == "cosine"
    assert policy.precision_for("cpu").name == "fp32"


@pytest.mark.parametrize(
    "wrong", [{"max_length": 0}, {"accumulation": 0}, {"learning_rate": 2.0}, {"precision": "int8"}, {"lora_r": -1}]
)
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainingPolicy(**wrong)  # type: ignore[arg-type]


def test_length_report_of_long_articles() -> None:
    report = length_report([100] * 94 + [700] + [9000] * 5, cap=1024)
    assert (report.count, report.median, report.p95, report.longest) == (100, 100, 700, 9000)
    assert report.over_cap == 5 and report.suggested == 704  # rounded up to a multiple of 8
    assert length_report([9000] * 10).suggested == 2048  # never above what is reasonable
    assert length_report([9000] * 10, limit=512).suggested == 512  # nor above the model's positions
    assert length_report([3, 5, 100]).short == 2
    with pytest.raises(ValueError, match="no sample"):
        length_report([])


def test_encode_cuts_and_checks() -> None:
    collate = SafeCollator(WordTokenizer(), TrainingPolicy(max_length=4), vocabulary=6)
    assert collate.encode("a bb ccc dddd eeeee") == [1, 2, 3, 4]
    assert collate.encode({"input_ids": (1, 2, 3, 4, 5)}) == [1, 2, 3, 4]
    assert collate.pad == 9  # no padding token: the end token, masked in the labels


@pytest.mark.parametrize(
    ("sample", "error", "words"),
    [
        (7, TypeError, "a text or a mapping"),
        ({"label": 1}, TypeError, "needs `input_ids` or `text`"),
        ({"input_ids": "text"}, TypeError, "list of integers"),
        ({"input_ids": [[1, 2], [3]]}, TypeError, "nested list"),
        ({"input_ids": [1.5]}, TypeError, "float"),
        ({"input_ids": [True]}, TypeError, "bool"),
        ({"input_ids": []}, ValueError, "empty"),
        ("", ValueError, "empty"),
        ({"input_ids": [1, 6]}, ValueError, "rows 0 to 5"),
        ({"input_ids": [-1]}, ValueError, "rows 0 to 5"),
    ],
)
def test_what_is_no_tokenized_input_is_named(sample: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SafeCollator(WordTokenizer(), vocabulary=6).encode(sample)


def gpu(free_mib: int, cuda: str | None = "12.6", usable: bool = True) -> SimpleNamespace:
    """A stand-in for torch with one GPU of 24 GiB."""
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: usable,
            device_count=lambda: 1,
            mem_get_info=lambda index: (free_mib << 20, 24576 << 20),
            get_device_capability=lambda index: (8, 6),
            get_device_name=lambda index: "a GPU",
        ),
    )


def test_the_precheck_tells_name_and_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", gpu(20000))
    found = gpu_precheck(min_free_mib=8000)
    assert (found.name, found.sm, found.free_mib, found.total_mib) == ("a GPU", "8.6", 20000, 24576)


@pytest.mark.parametrize(
    ("torch", "device", "words"),
    [
        (gpu(3000), 0, "3000 MiB free of 24576, 8000 are wanted"),
        (gpu(20000, cuda=None), 0, "a build without CUDA"),
        (gpu(20000, usable=False), 0, "no GPU can be used"),
        (gpu(20000), 3, "there is no GPU 3"),
    ],
)
def test_the_precheck_stops_before_anything_is_spent(
    torch: SimpleNamespace, device: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(NotReadyError, match=words):
        gpu_precheck(min_free_mib=8000, device=device)


def test_precision_follows_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", gpu(20000))
    assert TrainingPolicy().precision_for("cuda").name == "bf16"
    old = gpu(20000)
    old.cuda.get_device_capability = lambda index: (7, 0)
    monkeypatch.setitem(sys.modules, "torch", old)
    half = TrainingPolicy().precision_for("cuda")
    assert half.name == "fp16" and "no native bfloat16" in half.reason
