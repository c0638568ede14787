"""The findings of a receipt: what `diagnose` makes of its logs, and what the checks themselves observed."""

from __future__ import annotations

from typing import Any

# A check that failed by its own measurement -> the finding id that names this kind. What raised is left to the log.
OBSERVED = {
    "environment.device": "cpu-only-torch",
    "environment.torch-build": "wrong-local-build",
    "environment.driver": "driver-too-old",
    "environment.sm-list": "no-kernel-image",
    "environment.shm": "shm-too-small",
    "environment.caches": "cache-not-writable",
    "data.vocabulary": "device-assert-embedding-index",
    "data.cap": "device-assert-position-index",
    "training.devices": "device-mismatch",
    "training.dtypes": "dtype-mismatch",
    "training.trainable": "lora-not-training",
    "training.gradients": "lora-not-training",
    "training.adapters-move": "lora-not-training",
    "training.memory-flat": "memory-creep",
}


def explain(receipt: dict[str, Any]) -> dict[str, Any]:
    """The receipt with `findings` (most likely first) where it failed; unchanged where it passed or holds them.

    An observation of the proof itself is certain: it goes before what was read in a log, and its cause is the check's
    own sentence.
    """
    if receipt.get("passed") or receipt.get("findings"):
        return receipt
    import io

    from envforge.diagnose import diagnose
    from envforge.verify.explain import log_of

    driver = (receipt.get("host") or {}).get("driver")
    report = diagnose(io.BytesIO(log_of(receipt).encode()), driver=driver)
    read = [finding.to_json() for finding in report.findings]
    seen = observed(receipt)
    known = {finding["id"] for finding in seen}
    return {**receipt, "findings": seen + [finding for finding in read if finding["id"] not in known]}


def observed(receipt: dict[str, Any]) -> list[dict[str, Any]]:
    """Findings of the checks that failed by their own measurement."""
    from envforge.diagnose.rules import load_rules

    rules = {rule.id: rule for rule in load_rules().rules}
    found: dict[str, dict[str, Any]] = {}
    for layer in receipt.get("layers", ()):
        for check in layer.get("checks", ()):
            rule = rules.get(kind_of(check))
            if check.get("status") != "fail" or check.get("error") or rule is None or rule.id in found:
                continue
            found[rule.id] = {
                "id": rule.id,
                "title": rule.title,
                "confidence": "certain",
                "severity": rule.severity,
                "owner": rule.owner,
                "retryable": rule.retryable,
                "evidence": [{"check": check["id"], "text": check["text"]}],
                "count": 1,
                "cause": check["text"],
                "fixes": [],
                "next": [],
                "consequence_of": [],
                "source": rule.source,
            }
    return list(found.values())


def kind_of(check: dict[str, Any]) -> str:
    """The finding id behind a check, "" when it has none."""
    identity, text = str(check.get("id")), str(check.get("text"))
    if identity == "training.steps" and "loss is finite" in text and "gradient norm" in text:
        return "nan-grad-fp16" if "float16" in text else ""
    if identity == "training.steps" and "the loss is" in text:
        return "nan-loss"
    if identity == "environment.compiler":
        return "triton-no-compiler" if "C compiler" in text else "triton-no-python-headers"
    return OBSERVED.get(identity, "")
