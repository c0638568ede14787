"""Drivers, capabilities and GPU code."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envforge.errors import UsageError
from envforge.resolver.hosts import covers, make_host, parse_driver, parse_host, parse_sm


@pytest.mark.parametrize("text", ["550.54.15", "470.86", "535.104.05", "1234.5"])
def test_driver_versions(text: str) -> None:
    assert parse_driver(f" {text} ") == text


def test_no_driver_by_word() -> None:
    assert parse_driver("None") is None


@pytest.mark.parametrize(
    "text", ["550", "550.54.15-ubuntu", "12.4", "", "driver", "550.54.15.1.2", "５５０.54", "9" * 5000]
)
def test_other_driver_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_driver(text)
    assert len(caught.value.cause) < 200


def test_a_driver_with_a_suffix_is_recognised_in_the_hint() -> None:
    with pytest.raises(UsageError) as caught:
        parse_driver("550.54.15-0ubuntu1")
    assert "meant 550.54.15?" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "sm"), [("sm_86", "8.6"), ("sm_120", "12.0"), ("SM90a", "9.0"), ("8.6", "8.6"), ("compute_75", "7.5")]
)
def test_capabilities(text: str, sm: str) -> None:
    assert parse_sm(text) == sm


def test_a_name_is_no_capability() -> None:
    assert parse_sm("A100") is None and parse_sm("sm_") is None


def test_cubins_run_within_their_major_upwards() -> None:
    assert covers(["8.0", "8.6"], [], "8.9", jit=False) == "cubin"
    assert covers(["8.6"], [], "8.0", jit=False) is None
    assert covers(["7.5", "9.0"], [], "8.0", jit=False) is None
    assert covers(["10.0"], [], "12.0", jit=True) is None


def test_ptx_counts_only_where_the_driver_can_compile_it() -> None:
    assert covers(["9.0"], ["9.0"], "10.0", jit=True) == "ptx"
    assert covers(["9.0"], ["9.0"], "10.0", jit=False) is None
    assert covers([], ["12.0"], "9.0", jit=True) is None


def test_gpus_without_a_driver_are_a_contradiction() -> None:
    with pytest.raises(UsageError, match="driver is none"):
        make_host("h", "none", ["sm_80"])


def test_a_host_file_from_another_tool_is_named() -> None:
    with pytest.raises(UsageError, match=r"lshw\.json is not a host file"):
        parse_host({"id": "host", "class": "system"}, "lshw.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {"schema": st.just(1), "driver": json_values, "gpus": json_values},
        optional={
            "arch": json_values,
            "glibc": json_values,
            "cuda_max": json_values,
            "labels": json_values,
            "os": json_values,
        },
    )
)
def test_any_host_file_is_a_host_or_a_usage_error(data: object) -> None:
    with contextlib.suppress(UsageError):
        parse_host(data, "host.json")
