# ruff: noqa: E501
"""Loading the matrix: every fault at once with its place, the cache, and layers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from envforge.errors import DataError
from envforge.matrix.load import DATA, load_matrix

SMALL = """\
sources:
  page: {text: a page, confidence: from-official-doc}
packages:
- {name: torch, role: torch, rank: 1, summary: torch, source: page}
- {name: numpy, role: library, rank: 2, summary: arrays, source: page}
torch:
- {torch: "2.6", variant: cu126, cuda: "12.6", arch: x86_64, sm: "8.0 9.0", default: true, source: page}
gpus:
- {name: A100, sm: "8.0", memory_gib: [40, 80], architecture: Ampere, aliases: [A100X], source: page}
rules:
- id: old-numpy
  level: hard
  when: {torch: "<2.3"}
  needs: {numpy: "<2"}
  text: it breaks
  source: page
notes:
- {id: hello, about: torch, text: a note, source: {text: inline, confidence: inferred}}
policy: {as_of: "2026-11-30", pythons: "3.12 3.11", coherence_days: 30, stale_days: 270}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    (place / "small.yaml").write_text(SMALL)
    return place


def faults_of(folder: Path, *layers: Path) -> list[str]:
    with pytest.raises(DataError) as caught:
        load_matrix(folder, layers, use_cache=False)
    return [
        fault.replace(f"{folder}/", "").replace(f"{folder.parent}/", "") for fault in caught.value.cause.split("\n")
    ]


def test_rows_become_values(folder: Path) -> None:
    matrix = load_matrix(folder, use_cache=False)
    [build] = matrix.torch_builds
    assert (build.torch, build.sm, build.ptx, build.default, build.cuda) == ("2.6", ("8.0", "9.0"), (), True, "12.6")
    assert build.source.text == "a page"
    assert matrix.notes[0].source.confidence == "inferred"
    assert list(matrix.packages) == ["torch", "numpy"]
    assert matrix.rules[0].requires == {}
    assert matrix.policy.pythons == ("3.12", "3.11")
    assert matrix.layers == ("shipped",)
    assert len(matrix.hash) == 64


def test_every_fault_of_schema_at_once_across_files(folder: Path) -> None:
    (folder / "a.yaml").write_text(
        "families:\n"
        "- {major: 12, min_driver: 525, source: page}\n"
        "- {major: 12, min_drivre: '525.60.13', source: {text: x, confidence: guess}}\n"
    )
    (folder / "b.yaml").write_text("branches:\n- {branch: 550, cuda: 12.4, source: {text: x, confidence: inferred}}\n")
    assert faults_of(folder) == [
        'a.yaml:2: families row 1 field min_driver: 525 is a number, must be text: write it in quotes, "525"',
        "a.yaml:3: families row 2 field min_drivre: unknown field; did you mean min_driver? "
        "(known: major, min_driver, source)",
        'a.yaml:3: families row 2 field source.confidence: "guess" is not allowed; allowed: verified-from-metadata, '
        "verified-by-execution, from-official-doc, from-issue-report, inferred",
        "a.yaml:3: families row 2: field min_driver is missing",
        'b.yaml:2: branches row 1 field cuda: 12.4 is a number, must be text: write it in quotes, "12.4"',
    ]


# One change to the small matrix each; the place and the words of the fault that it must give.
MEANING = [
    ("source: page}\n- {name: numpy", "source: pgae}\n- {name: numpy", 'small.yaml:4: packages row 1 field source: "pgae" is not in the sources of this file; did you mean page?'),
    ("rank: 2", "rank: 1", "small.yaml:5: packages row 2 field rank: 1 is the rank of torch already"),
    ('cuda: "12.6"', 'cuda: "12.4"', "small.yaml:7: torch row 1 field cuda: 12.4 does not belong to cu126"),
    ("variant: cu126", "variant: cpu", "small.yaml:7: torch row 1 field cuda: a cpu build has none"),
    ('sm: "8.0 9.0"', 'sm: ""', "small.yaml:7: torch row 1 field sm: a CUDA build has GPU code"),
    ("aliases: [A100X]", "aliases: [A100X]", None),
    ("needs: {numpy:", "needs: {nunpy:", "small.yaml:14: rules row 1 field needs.nunpy: nunpy is no package of the matrix and no virtual name; did you mean numpy?"),
    ('needs: {numpy: "<2"}', 'needs: {numpy: "2"}', 'small.yaml:14: rules row 1 field needs.numpy: "2" is not a version specifier such as ">=2.4,<3"'),
    ('needs: {numpy: "<2"}', 'needs: {numpy: "===2"}', 'small.yaml:14: rules row 1 field needs.numpy: "===2": === compares text, not versions; write =='),
    ('needs: {numpy: "<2"}', 'needs: {numpy: ","}', 'small.yaml:14: rules row 1 field needs.numpy: "," limits nothing'),
    ('needs: {numpy: "<2"}', 'needs: {variant: "cu126, cu12"}', "small.yaml:14: rules row 1 field needs.variant: no torch build has the variant cu12; did you mean cu126?"),
    ('  needs: {numpy: "<2"}\n', "", "small.yaml:13: rules row 1 field when: needs nothing and requires nothing, so it can never refuse"),
    ('needs: {numpy: "<2"}', 'requires: {driver: ">=500"}', "small.yaml:14: rules row 1 field requires.driver: driver is not a package"),
    ("text: it breaks", "text: it breaks\n  warning: oops", "small.yaml:16: rules row 1 field warning: only a rule of level warn has a warning"),
    ("rules:\n", 'native:\n- {package: tork, versions: ">=1", match: any, source: page}\nrules:\n', "small.yaml:11: native row 1 field package: tork is no package of the matrix; did you mean torch?"),
    ("rules:\n", 'native:\n- {package: torch, versions: ">>1", match: exact, source: page}\nrules:\n', 'small.yaml:11: native row 1 field versions: ">>1" is not a version specifier such as ">=2.4,<3"'),
    ("rules:\n", 'native:\n- {package: torch, versions: ">=1", match: exact, source: page}\nrules:\n', "small.yaml:11: native row 1 field cuda: match exact without any CUDA version"),
    ("rules:\n", 'toolkits:\n- {cuda: "12.4", release: GA, driver: 550.54.14, branch: 545, source: page}\nrules:\n', "small.yaml:11: toolkits row 1 field driver: 550.54.14 is not of branch 545"),
    ("rules:\n", "cuda_images:\n- {os: ubuntu22.04, cuda: 12.4.1, kinds: [devel], arch: [x86_64], source: page}\nrules:\n", "small.yaml:11: cuda_images row 1 field os: ubuntu22.04 has no row in systems"),
    ("rules:\n", "- {name: NVIDIA A100 80GB, sm: '8.0', memory_gib: [80], architecture: Ampere, source: page}\nrules:\n", 'small.yaml:10: gpus row 2 field name: "NVIDIA A100 80GB" cannot be told from A100'),
    ("gpus:\n", "- {torch: '2.6', variant: cu124, cuda: '12.4', arch: x86_64, sm: '8.0', default: true, source: page}\ngpus:\n", "small.yaml:8: torch row 2 field default: cu126 is the default of torch 2.6 already"),
    ("notes:\n", "notes:\n- {id: hello, about: x, text: y, source: page}\n", "small.yaml:19: notes row 2: the same id as in small.yaml:18"),
    ("  page:", "  other: {text: b, confidence: inferred}\n  page:", "small.yaml:2: field sources.other: no row uses it"),
    (", stale_days: 270", "", "small.yaml:1: policy: stale_days missing in every file"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "fault"), MEANING)
def test_faults_of_meaning_name_line_row_and_field(folder: Path, old: str, new: str, fault: str | None) -> None:
    assert old in SMALL
    (folder / "small.yaml").write_text(SMALL.replace(old, new, 1))
    if fault is None:
        load_matrix(folder, use_cache=False)
    else:
        assert fault in faults_of(folder)


def test_bytes_that_are_no_text_and_folders_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    (folder / "bad.yaml").write_bytes(b"notes: []\n# caf\xe9\n")
    assert faults_of(folder) == ["bad.yaml:2: not UTF-8 text"]
    with pytest.raises(DataError, match=r"nowhere: no such file or folder of matrix rows"):
        load_matrix(tmp_path / "nowhere", use_cache=False)


def test_the_diagnosis_file_is_left_to_the_diagnosis(folder: Path) -> None:
    (folder / "diagnoses.yaml").write_text("anything: [at all]\n")
    load_matrix(folder, use_cache=False)


# --- cache


def test_cold_and_warm_are_equal_and_a_change_is_seen(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cold = load_matrix(folder, cache=cache)
    [kept] = cache.iterdir()
    before = kept.stat().st_mtime_ns
    assert load_matrix(folder, cache=cache) == cold
    assert kept.stat().st_mtime_ns == before
    (folder / "small.yaml").write_text(SMALL.replace("a note", "another"))
    changed = load_matrix(folder, cache=cache)
    assert changed.notes[0].text == "another"
    assert changed.hash != cold.hash
    assert len(list(cache.iterdir())) == 2


def test_shipped_data_cold_and_warm_are_equal(tmp_path: Path) -> None:
    cold = load_matrix(cache=tmp_path)
    assert load_matrix(cache=tmp_path) == cold == load_matrix(use_cache=False)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\n{}", b"\xff\xff\n[]", None])
def test_a_damaged_cache_is_ignored_and_written_again(folder: Path, tmp_path: Path, damage: bytes | None) -> None:
    cache = tmp_path / "cache"
    cold = load_matrix(folder, cache=cache)
    [kept] = cache.iterdir()
    good = kept.read_bytes()
    kept.write_bytes(good.replace(b"a note", b"a lie!") if damage is None else damage)
    assert load_matrix(folder, cache=cache) == cold
    assert kept.read_bytes() == good


def test_a_cache_that_cannot_be_written_only_costs_time(folder: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    matrix = load_matrix(folder, cache=blocked)
    assert matrix == load_matrix(folder, use_cache=False)
    assert blocked.read_text() == "not a folder"


def test_faulty_files_are_never_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "small.yaml").write_text(SMALL.replace("rank: 2", "rank: 1"))
    with pytest.raises(DataError):
        load_matrix(folder, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_old_results_do_not_pile_up(folder: Path, tmp_path: Path) -> None:
    for number in range(12):
        (folder / "small.yaml").write_text(SMALL.replace("a note", f"note {number}"))
        load_matrix(folder, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 8


def test_a_warm_load_needs_no_heavy_import(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from envforge.matrix.load import load_matrix; "
        f"load_matrix(cache=pathlib.Path({str(tmp_path)!r})); "
        "print(sorted({'yaml', 'jsonschema', 'packaging', 'difflib'} & set(sys.modules)))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    assert "yaml" in runs[0]
    assert runs[1] == "[]"


# --- layers


def test_layers_replace_rows_of_the_same_identity_and_add_others(folder: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "own.yaml").write_text(
        "packages:\n- {name: ours, role: library, rank: 3, summary: ours, source: {text: site, confidence: inferred}}\n"
        "rules:\n- id: old-numpy\n  level: warn\n  when: {torch: '<2.4'}\n  needs: {ours: '>=1'}\n  text: site says\n"
        "  source: {text: site, confidence: inferred}\n"
        "policy: {stale_days: 90}\n"
    )
    user = tmp_path / "user.yaml"
    user.write_text("policy: {stale_days: 10}\n")
    matrix = load_matrix(folder, (site, user), use_cache=False)
    [rule] = matrix.rules
    assert (rule.level, rule.text, rule.warning) == ("warn", "site says", "old-numpy")
    assert list(matrix.packages) == ["torch", "numpy", "ours"]
    assert (matrix.policy.stale_days, matrix.policy.coherence_days) == (10, 30)
    assert matrix.layers == ("shipped", str(site), str(user))
    plain = load_matrix(folder, use_cache=False)
    assert len({plain.hash, matrix.hash, load_matrix(folder, (user,), use_cache=False).hash}) == 3


def test_a_fault_in_a_layer_names_the_layer_and_sees_the_rows_below(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "packages:\n- {name: ours, role: library, rank: 2, summary: o, source: {text: site, confidence: inferred}}\n"
    )
    assert faults_of(folder, own) == ["own.yaml:2: packages row 1 field rank: 2 is the rank of numpy already"]


def test_an_empty_layer_changes_the_hash_only(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "matrix.d").mkdir()
    with_layer = load_matrix(folder, (tmp_path / "matrix.d",), use_cache=False)
    assert with_layer.rules == load_matrix(folder, use_cache=False).rules


def test_a_copy_of_the_shipped_data_is_the_same_matrix(tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path / "copy")
    assert load_matrix(tmp_path / "copy", use_cache=False) == load_matrix(use_cache=False)


def test_the_hash_does_not_depend_on_where_a_layer_lies(folder: Path, tmp_path: Path) -> None:
    hashes = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.yaml").write_text("policy: {stale_days: 5}\n")
        hashes.add(load_matrix(folder, (tmp_path / name,), use_cache=False).hash)
    assert len(hashes) == 1
