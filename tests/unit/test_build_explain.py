"""What a failed proof of a build says: the diagnosis of its receipt, given in by the command line."""

from __future__ import annotations

from typing import Any

from envforge.cli.findings import explain
from envforge.errors import ProofFailedError
from envforge.image.engines import ImageInfo
from envforge.image.prove import _proof_error


def test_the_first_finding_stands_in_the_hint() -> None:
    check = {"id": "environment.caches", "status": "fail", "text": "not writable by uid 12345: HF_HOME", "error": ""}
    receipt = {"passed": False, "layers": [{"layer": "environment", "status": "fail", "checks": [check], "runs": []}]}
    explained = explain(receipt)
    assert explained["findings"][0]["id"] == "cache-not-writable"

    class Docker:
        name = "docker"

    image: Any = ImageInfo.__new__(ImageInfo)
    object.__setattr__(image, "id", "sha256:abc")
    engine: Any = Docker()
    error = _proof_error(1, "FAILED in the environment layer, environment.caches: ...", explained, image, engine)
    assert isinstance(error, ProofFailedError)
    assert "not writable by uid 12345: HF_HOME" in str(error.hint) and "sha256:abc" in str(error.hint)


def test_a_receipt_that_passed_is_left_alone() -> None:
    passed = {"passed": True, "layers": []}
    assert explain(passed) is passed
