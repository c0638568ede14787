"""Request lines: what is accepted, and the one message for what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envforge.errors import UsageError
from envforge.resolver.request import parse_request


def test_names_are_normalised_and_specifiers_kept() -> None:
    request = parse_request("Huggingface_Hub >=0.30,<1")
    assert (request.name, set(request.specifier.split(","))) == ("huggingface-hub", {">=0.30", "<1"})
    assert parse_request("transformers[torch,Deepspeed]==4.46.3").extras == ("deepspeed", "torch")


def test_a_local_label_names_the_variant() -> None:
    request = parse_request("torch==2.10.0+cu130")
    assert (request.specifier, request.local, request.pinned) == ("==2.10.0", "cu130", "2.10.0")


def test_only_exact_pins_are_pins() -> None:
    assert parse_request("torch==2.1.*").pinned is None
    assert parse_request("torch>=2.1").pinned is None
    assert parse_request("bitsandbytes==0.41.2.post2").pinned == "0.41.2.post2"


@pytest.mark.parametrize(
    "line",
    [
        "torch=2.1",
        "torch>>2",
        "",
        "-r x",
        "törch",
        "torch @ https://example.invalid/x.whl",
        "a" * 9000,
        "torch; rm -rf /",
    ],
)
def test_what_is_not_a_requirement_is_refused_by_name(line: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_request(line)
    assert caught.value.exit_code == 2 and len(caught.value.cause) < 300


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("torch=2.6", "torch==2.6"),
        ("torch 2.6.0", "torch==2.6.0"),
        ("git+https://example.invalid/u.git@0123abc", "NAME @ git+https"),
        ("./x-1.0-py3-none-any.whl", "NAME @ ./x"),
    ],
)
def test_near_misses_are_shown_written_right(line: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_request(line)
    assert hint in caught.value.hint


def test_git_and_local_paths_are_kept() -> None:
    assert parse_request("unsloth @ git+https://example.invalid/u.git@0123abc").url == (
        "git+https://example.invalid/u.git@0123abc"
    )


@given(st.text(max_size=80))
def test_any_text_is_a_request_or_a_usage_error(line: str) -> None:
    try:
        parse_request(line)
    except UsageError as error:
        assert "\n" not in error.cause
