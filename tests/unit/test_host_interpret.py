"""From records to facts: any text gives an answer, overrides, the JSON that `resolve --host` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from envforge.errors import UsageError
from envforge.host import HostFacts, Override, interpret, to_json
from envforge.host.names import gpu_finder
from envforge.host.record import FILES, clean
from envforge.host.smi import Smi, read_smi, scan_messages
from envforge.host.system import read_arch, read_env, read_glibc, read_module, read_os, read_python
from envforge.host.text import bus, driver, number
from envforge.matrix.load import load_matrix
from envforge.resolver.hosts import parse_host

CASES = Path(__file__).parent.parent / "cases" / "detect"
LINES = sorted(
    {
        line
        for path in CASES.glob("*.yaml")
        for case in yaml.safe_load(path.read_text())
        for text in case["recorded"].values()
        for line in str(text).splitlines()
    }
)
# Real lines, cut anywhere and mixed with noise: pure noise never gets past the first pattern.
PIECE = st.one_of(
    st.text(max_size=40),
    st.sampled_from(LINES),
    st.tuples(st.sampled_from(LINES), st.integers(0, 60), st.text(max_size=5)).map(lambda t: t[0][: t[1]] + t[2]),
)
RECORDS = st.dictionaries(st.sampled_from(FILES), st.lists(PIECE, max_size=12).map("\n".join), max_size=8)
KEYS = ("driver", "cuda", "gpus", "index", "name", "processes", "pid", "error", "code", "library", "sm", "bus")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=12,
)
FIND_GPU = gpu_finder(load_matrix())
A100 = "0, NVIDIA A100-SXM4-80GB, 535.104.05, 8.0, 81920, 4, Disabled, GPU-1, 00000000:07:00.0\n"


@settings(max_examples=200, deadline=None)
@given(record=RECORDS)
def test_any_text_gives_facts_that_resolve_can_read(record: dict[str, str]) -> None:
    facts = interpret(record, find_gpu=FIND_GPU)
    data = json.loads(json.dumps(to_json(facts)))
    assert data["source"] in ("nvml", "nvidia-smi", "proc", "sysfs", "override", "none")
    assert (data["driver"] is None) == (data["source"] == "none") or data["source"] == "override" or data["problems"]
    try:
        host = parse_host(data, "host.json")
    except UsageError as error:
        assert "architecture" in error.cause
    else:
        assert host.driver == facts.driver and len(host.gpus) == len(facts.gpus)


@settings(max_examples=100, deadline=None)
@given(value=JSON)
def test_any_json_from_the_nvml_child_gives_facts(value: object) -> None:
    to_json(interpret({"nvml.json": json.dumps(value)}))


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 10_000, "nan", '"x', "\x00"])
def test_hostile_json_from_the_nvml_child_gives_facts(text: str) -> None:
    assert interpret({"nvml.json": text}).gpus == ()


def test_equal_records_give_equal_bytes_with_sorted_keys() -> None:
    data = to_json(interpret({"nvidia-smi-query.csv": A100}))
    assert list(data) == sorted(data) and list(data["gpus"][0]) == sorted(data["gpus"][0])
    assert set(data) == {
        *("schema", "source", "driver", "cuda_max", "gpus", "os", "glibc", "arch", "python", "engine", "problems"),
        *("wsl", "container", "slurm", "memory_mib"),
    }
    assert data == to_json(interpret({"nvidia-smi-query.csv": A100}))


def test_an_empty_record_is_a_host_without_anything() -> None:
    facts = interpret({})
    assert (facts.source, facts.driver, facts.gpus) == ("none", None, ())
    assert [row.id for row in facts.problems] == ["driver-missing"]


def test_none_by_word_hides_gpus_and_problems() -> None:
    facts = interpret({"nvidia-smi-query.csv": A100, "glibc": "2.35"}, Override(None))
    assert facts == HostFacts(source="override", glibc="2.35")


def test_a_driver_by_word_keeps_the_gpus_and_drops_the_cuda_of_the_other_driver() -> None:
    table = "| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2 |\n"
    record = {"nvidia-smi-query.csv": A100, "nvidia-smi.txt": table}
    assert interpret(record).cuda_max == "12.2"
    facts = interpret(record, Override("580.95.05"))
    assert (facts.source, facts.driver, facts.cuda_max, len(facts.gpus)) == ("override", "580.95.05", None, 1)
    assert interpret(record, Override("535.104.05")).cuda_max == "12.2"


def test_a_driver_by_word_keeps_problems_of_the_machine_itself() -> None:
    hung = {"nvidia-smi.rc": "124"}
    assert [row.id for row in interpret(hung, Override("550.54.15")).problems] == ["driver-hung"]
    assert interpret({}, Override("550.54.15")).problems == ()


@pytest.mark.parametrize("word", ["abc", "12", "", "535.104.05; rm"])
def test_a_recorded_override_that_is_none_is_passed_over(word: str) -> None:
    assert interpret({"env": f"ENVFORGE_DRIVER={word}", "nvidia-smi-query.csv": A100}).source == "nvidia-smi"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("440.33.01", "440.33.01"),
        ("470.86\n", "470.86"),
        ("570.158.01-open", "570.158.01"),
        ("1.2.3.4", None),
        ("535.104.05.1", None),
        ("12345.1", None),
        ("535", None),
        ("N/A", None),
        (None, None),
    ],
)
def test_driver_versions_keep_their_text(text: str | None, wanted: str | None) -> None:
    assert driver(text) == wanted


def test_numbers_and_addresses() -> None:
    assert [number(text) for text in ("24576 MiB", "81559", "9" * 30, "[N/A]", None)] == [
        24576,
        81559,
        None,
        None,
        None,
    ]
    assert bus("00000000:3B:00.0") == bus("GPU 0000:3b:00.0") == bus("3b:00.0") == "0000:3b:00.0"
    assert bus("0000000F:01:00.0") == "000f:01:00.0" and bus("nothing") is None


def test_colours_controls_and_other_digits_are_cleaned() -> None:
    assert clean("\x1b[1;32mA\x1b[0m\r\nB\rC\x00\ufeff\xa0٣") == "A\nB\nC 3"
    assert clean("\x1b]0;title\x07x") == "x"


@pytest.mark.parametrize(
    "text",
    [
        "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error",
        "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error",
        "Unable to determine the device handle for gpu 00000000:3B:00.0: Not Found",
        "Unable to determine the device handle for GPU7: 0000:3B:00.0: GPU is lost.",
        "Unable to determine the device handle for GPU12:00000000:3B:00.0: Unknown Error",
    ],
)
def test_the_lost_gpu_is_named_in_every_wording(text: str) -> None:
    smi = Smi()
    scan_messages(text, smi)
    assert [row.where for row in smi.lost] == ["0000:3b:00.0"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("glibc 2.36", "2.36"),
        ("ldd (Ubuntu GLIBC 2.35-0ubuntu3.8) 2.35\nCopyright 2022", "2.35"),
        ("ldd (GNU libc) 2.28", "2.28"),
        ("GNU C Library (Debian GLIBC 2.31-13) stable release version 2.31.", "2.31"),
        ("2.17", "2.17"),
        ("musl libc (x86_64)\nVersion 1.2.4", "musl"),
        ("none", None),
    ],
)
def test_glibc_shapes(text: str, wanted: str | None) -> None:
    assert read_glibc(text) == wanted


def test_system_words() -> None:
    assert read_os('ID="rocky"\nVERSION_ID="9.4"\n') == "rocky9.4" and read_os("ID=arch\n") == "arch"
    assert read_os("nonsense") is None
    assert [read_arch(text) for text in ("amd64", "arm64\n", "x86_64", "")] == ["x86_64", "aarch64", "x86_64", None]
    assert read_python("Python 3.12.1") == "3.12" and read_python("no python") is None
    assert read_env("export A='b c'\nB=\"d\nC\n=e\nD=") == {"A": "b c", "B": "d", "D": ""}


NVRM = "NVRM version: NVIDIA UNIX "
GCC = "GCC version:  gcc version 13.3.0 (module builder)"


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        (f"{NVRM}x86_64 Kernel Module  375.74  Wed Jun 14\n{GCC}", "375.74", False),
        (f"{NVRM}Open Kernel Module for aarch64  580.95.05  Release Build", "580.95.05", True),
        (f"{GCC}\n{NVRM}x86_64 Kernel Module  550.54.15", "550.54.15", False),
        ("NVRM version: something else 510.47.03", "510.47.03", False),
        ("", None, None),
    ],
)
def test_module_file_shapes(text: str, version: str | None, is_open: bool | None) -> None:
    module = read_module(text)
    assert (module.version, module.open) == (version, is_open)


@pytest.mark.parametrize(
    ("name", "memory", "sm"),
    [
        ("Tesla V100-SXM2...", None, "7.0"),
        ("NVIDIA A100-SXM...", None, "8.0"),
        ("NVIDIA A10...", 23028, "8.6"),
        ("NVIDIA A10...", 40960, "8.0"),
        ("NVIDIA A10...", None, None),
        ("GeForce GTX 108...", None, "6.1"),
        ("NVIDIA GeForce RTX 5070 ...", 12227, "12.0"),
        ("NVIDIA GeForce ...", 8192, None),
        ("...", None, None),
        ("NVIDIA L4", None, "8.9"),
        ("a card of tomorrow", None, None),
    ],
)
def test_cut_names_get_a_capability_only_when_it_is_certain(name: str, memory: int | None, sm: str | None) -> None:
    assert FIND_GPU(name, memory) == sm


def test_bytes_that_are_no_text_are_no_gpu() -> None:
    noise = "7, \ufffdx\ufffd\ufffd, 1\n"
    named = "0, Quadro\ufffd RTX 4000, 535.104.05, 7.5\n"
    assert list(read_smi("", noise + named, "").gpus) == [0]
