# ruff: noqa: E501
"""`envforge matrix check`: the shipped rows are clean, and each kind of fault is found where it stands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from envforge.matrix.check import Finding, check_matrix
from envforge.matrix.load import DATA, SCHEMA, collect
from envforge.matrix.meaning import parse_file
from envforge.matrix.releases import RELEASES


def test_the_shipped_matrix_has_no_findings() -> None:
    assert [finding.text() for finding in check_matrix()] == []


SCHEMA_OF_FILES = json.loads(SCHEMA.read_text(encoding="utf-8"))
FILES = [(file, parse_file(file.where, file.raw, SCHEMA_OF_FILES)) for file in collect(DATA, ())]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DATA, tmp_path / "data")
    return tmp_path / "data"


def broken(name: str, old: str, new: str) -> list[Finding]:
    """The findings when one file says something else; only that file is read again."""
    files = []
    for file, parsed in FILES:
        if file.inside == name:
            assert file.raw.count(old.encode()) >= 1, old
            raw = file.raw.replace(old.encode(), new.encode(), 1)
            parsed = parse_file(file.where, raw, SCHEMA_OF_FILES)
        files.append((file, parsed))
    return check_matrix(files=files)


# One slip each: file, what stands there, what it becomes, the check that finds it, and words of the message.
SLIPS = [
    ("driver-cuda.yaml", 'driver: "560.35.03"', 'driver: "560.35.30"', "toolkit", "older than 560.35.30"),
    ("driver-cuda.yaml", 'min_driver: "525.60.13"', 'min_driver: "525.60.12"', "family", "12.0"),
    ("driver-cuda.yaml", "branches: [535, 570, 580]", "branches: [535, 575, 580]", "forward", "13.2 leaves"),
    ("gpus.yaml", 'sm: "8.9", memory_gib: [24], architecture: Ada', 'sm: "8.6", memory_gib: [24], architecture: Ada', "gpu", "generation"),
    ("gpus.yaml", "memory_gib: [141]", "memory_gib: [142]", "gpu", "142 GiB is no size"),
    ("gpus.yaml", "bf16: true, data_center: true", "bf16: false, data_center: true", "gpu", "has bf16"),
    ("torch.yaml", 'cuda: "12.6", arch: x86_64, sm: "5.0 6.0', 'cuda: "12.6", arch: x86_64, sm: "5.0 10.0', "gpu-code", "12.6 has no code for 10.0"),
    ("torch.yaml", '{torch: "2.13", variant: cpu, arch: aarch64', '{torch: "2.16", variant: cpu, arch: aarch64', "torch-build", "no torch 2.16"),
    ("torch.yaml", 'sm: "3.7 5.0 6.0 7.0 7.5 8.0 8.6 9.0", source: builder-2.3', 'sm: "3.7 5.0 6.0 7.5 8.0 8.6 9.0", source: builder-2.3', "gpu-code", "changes from torch 2.2 to 2.3: 7.0"),
    ("packages/bitsandbytes.yaml", '">=0.46.1,<0.47.0", cuda: "11.8', '">=0.46.1,<0.46.9", cuda: "11.8', "version", "0.46.9 is no release"),
    ("packages/deepspeed.yaml", "source_only: true", "source_only: false", "native", "has a wheel"),
    ("packages/torch.yaml", 'when: {torch: "<2.3"}', 'when: {torch: "<2.30"}', "answers", "torch 2.3.0, numpy 2.0.0"),
    ("packages/torch.yaml", 'needs: {numpy: "<2"}', 'needs: {numpy: ">=1.17"}', "never", "every known numpy meets"),
    ("packages/torch.yaml", 'when: {torchaudio: "==2.11.0"}', 'when: {torchaudio: "==2.11.9"}', "never", "met by nothing"),
    ("packages/framework.yaml", 'needs: {transformers: "<4.50"}', 'needs: {transformers: "<4.51"}', "answers", "4.50.0"),
    ("packages/kernels.yaml", 'needs: {transformers: "<4.54"}', 'needs: {transformers: "<4.55"}', "answers", "transformers 4.54.0"),
    ("transformers-floors.yaml", "warning: transformers-table", "warning: tranformers-table", "answers", "warning is known"),
    ("import-rules.yaml", 'needs: {transformers: ">=4.47"}', 'needs: {transformers: ">=4.46"}', "derived", "measured pairs"),
    ("bases.yaml", 'os: debian12, glibc: "2.36", pythons: "3.10"', 'os: debian12, glibc: "2.35", pythons: "3.10"', "base", "glibc 2.36"),
    ("driver-cuda.yaml", 'driver: "545.23.08", branch: 545, source: release-notes', 'driver: "545.23.08", branch: 545, source: forward-guide', "source", "recorded to rest on"),
    ("policy.yaml", 'as_of: "2026-11-30"', 'as_of: "2026-10-30"', "policy", "has a release of"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "id", "words"), SLIPS, ids=[f"{s[3]}-{i}" for i, s in enumerate(SLIPS)])
def test_a_slip_is_found_where_it_stands(file: str, old: str, new: str, id: str, words: str) -> None:
    line = (DATA / file).read_text(encoding="utf-8").split(old)[0].count("\n") + 1
    findings = broken(file, old, new)
    found = [f for f in findings if f.id == id and words in f.what]
    assert found, [f.text() for f in findings]
    assert all(f.do for f in found)
    assert any(f.where.endswith(file) and abs(f.line - line) <= 5 for f in found), [f.text() for f in findings]


def test_a_rule_that_another_one_covers_is_a_shadow() -> None:
    rule = (
        '- id: numpy2-torch-2.1\n  level: hard\n  when: {torch: "<2.2"}\n  needs: {numpy: "<2"}\n'
        "  text: torch before 2.2 was built for numpy 1.\n  source: numpy2\n"
    )
    findings = broken("packages/torch.yaml", "- id: torch-glibc-before-2.7", rule + "- id: torch-glibc-before-2.7")
    assert any(f.id == "shadow" and "numpy2-torch-before-2.3" in f.what for f in findings)


def test_a_rule_against_the_metadata_is_a_contradiction() -> None:
    # xtuner 0.2.0 itself pins transformers 4.48.0
    rule = (
        '- id: xtuner-new-transformers\n  level: hard\n  when: {xtuner: ">=0.2.0"}\n  needs: {transformers: ">=4.50"}\n'
        "  text: xtuner 0.2.0 and newer need transformers 4.50.\n  source: xtuner-0.2.0\n"
    )
    findings = broken("packages/trainers.yaml", "# --- xtuner\n", "# --- xtuner\n" + rule)
    assert any(f.id == "contradiction" and "==4.48.0" in f.what for f in findings), [f.text() for f in findings]


def test_packages_and_releases_need_each_other(folder: Path, tmp_path: Path) -> None:
    releases = tmp_path / "releases"
    shutil.copytree(RELEASES, releases)
    (releases / "scipy.json").unlink()
    (releases / "scipi.json").write_text(
        '{"schema": 1, "name": "scipi", "strings": [], "tags": [], "sets": [], "releases": []}'
    )
    texts = [f.text() for f in check_matrix(folder, releases=releases)]
    assert any("scipy has no releases" in text for text in texts)
    assert any("scipi has releases but no row in packages" in text for text in texts)


def test_a_damaged_release_file_is_named_and_the_rest_is_checked(folder: Path, tmp_path: Path) -> None:
    releases = tmp_path / "releases"
    shutil.copytree(RELEASES, releases)
    path = releases / "pandas.json"
    path.write_bytes(path.read_bytes()[:500])
    (folder / "policy.yaml").write_text((folder / "policy.yaml").read_text().replace("3.12 3.11", "3.12 3.12"))
    findings = check_matrix(folder, releases=releases)
    assert [f.where for f in findings if f.id == "damaged"] == ["matrix/releases/pandas.json"]
    assert any(f.id == "policy" and "twice" in f.what for f in findings)


def test_faults_of_the_loader_are_findings(folder: Path) -> None:
    (folder / "policy.yaml").write_text("policy: {as_of: 2026-11-30, stale_days: lots}\nx: &a 1\n")
    findings = check_matrix(folder)
    assert findings
    assert all(f.id == "load" and f.where.endswith("policy.yaml") for f in findings)
    assert {f.line for f in findings} == {1, 2}


def test_a_layer_may_say_otherwise_than_the_known_answers(folder: Path, tmp_path: Path) -> None:
    layer = tmp_path / "matrix.d"
    layer.mkdir()
    (layer / "site.yaml").write_text(
        'bases:\n- {ref: "python:3.12-slim-bookworm", digest: "sha256:' + "0" * 64 + '", os: debian12, glibc: "2.36",\n'
        '   pythons: "3.12", arch: [x86_64, aarch64], kind: slim, source: {text: our mirror, confidence: inferred}}\n'
    )
    assert [f.text() for f in check_matrix(folder, (layer,))] == []
