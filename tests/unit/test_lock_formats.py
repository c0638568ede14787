"""The two files of a lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from envforge.errors import DataError, OutsideError
from envforge.lock import PipSettings, install_command, install_options, python_platform, read_requirements, redact
from envforge.lock.formats import lock_hash, parse_pylock, pylock_text, requirements_text
from envforge.lock.project import Problem, Route
from envforge.lock.settings import named

A, B = "a" * 64, "b" * 64
PYLOCK = f'''lock-version = "1.0"
created-by = "uv"

[[packages]]
name = "torch"
version = "2.6.0+cu126"
wheels = [{{ url = "https://anna:pw@torch.example/whl/torch-2.6.0%2Bcu126-cp311-cp311-linux_x86_64.whl", hashes = {{ sha256 = "{A}" }} }}]

[[packages]]
name = "antlr"
version = "4.9.3"
sdist = {{ url = "https://x.example/antlr-4.9.3.tar.gz", upload-time = 2021-11-06T17:52:23Z, size = 117034, hashes = {{ sha256 = "{B}" }} }}

[[packages]]
name = "own"
version = "1.0"
archive = {{ path = "/somewhere/wheels/own-1.0-py3-none-any.whl", hashes = {{ sha256 = "{B}" }} }}
'''  # noqa: E501


def test_packages_of_a_pylock() -> None:
    packages = parse_pylock(PYLOCK, torch_names=["torch"], links=["/somewhere/wheels"])
    assert [(p.name, p.version, p.kind, p.size, p.uploaded) for p in packages] == [
        ("antlr", "4.9.3", "source", 117034, "2021-11-06"),
        ("own", "1.0", "find-links", None, None),
        ("torch", "2.6.0+cu126", "torch", None, None),
    ]
    assert packages[2].file == "torch-2.6.0+cu126-cp311-cp311-linux_x86_64.whl"
    assert packages[2].hashes == (f"sha256:{A}",)
    assert "anna" not in repr(packages)


def test_requirements_have_no_address_but_the_torch_indexs() -> None:
    packages = parse_pylock(PYLOCK, torch_names=["torch"], links=["/somewhere/wheels"])
    text = requirements_text(
        packages,
        python="3.11",
        platform="x86_64-manylinux_2_28",
        variant="cu126",
        torch_index="https://anna:pw@torch.example/whl/cu126",
        local=True,
    )
    assert text == (
        "# envforge lock: Python 3.11, cu126, x86_64-manylinux_2_28\n"
        "--extra-index-url https://torch.example/whl/cu126\n"
        "--find-links ./wheels\n"
        "# antlr is built from source when it is installed\n"
        f"antlr==4.9.3 \\\n    --hash=sha256:{B}\n"
        f"own==1.0 \\\n    --hash=sha256:{B}\n"
        f"torch==2.6.0+cu126 \\\n    --hash=sha256:{A}\n"
    )
    assert lock_hash(read_requirements(text)) == lock_hash(packages)
    assert [package.kind for package in read_requirements(text)] == ["source", "default", "default"]


def test_the_hash_covers_versions_and_hashes_only() -> None:
    packages = parse_pylock(PYLOCK)
    assert lock_hash(packages) == lock_hash(parse_pylock(PYLOCK.replace("torch.example", "mirror.example")))
    assert lock_hash(packages) != lock_hash(parse_pylock(PYLOCK.replace(A, "c" * 64)))
    assert lock_hash(packages) != lock_hash(parse_pylock(PYLOCK.replace("4.9.3", "4.9.4")))


def test_pylock_of_ours_names_its_wheels_by_relative_path() -> None:
    text = pylock_text(PYLOCK, {"plan": "x"}, Path("/somewhere/wheels"))
    assert 'path = "wheels/own-1.0-py3-none-any.whl"' in text
    assert "/somewhere" not in text
    assert "anna" not in text
    assert text.endswith('[tool.envforge]\nplan = "x"\n')


@pytest.mark.parametrize("text", ["", "not toml [", "[[packages]]\nname = 'x'\n"])
def test_nonsense_from_uv_is_said(text: str) -> None:
    with pytest.raises(OutsideError, match=r"pylock\.toml"):
        parse_pylock(text)


def test_a_package_without_hash_is_refused() -> None:
    with pytest.raises(OutsideError, match="no index gives a hash for torch"):
        parse_pylock(PYLOCK.replace(f'hashes = {{ sha256 = "{A}" }}', "size = 1"))


@pytest.mark.parametrize("line", ["torch", "torch==2.6.0", "torch>=2 --hash=sha256:aa", "-e .", "x @ file:///y"])
def test_what_is_no_lock_is_refused(line: str) -> None:
    with pytest.raises(DataError):
        read_requirements(f"{line}\n")


def test_install_command_of_no_lock(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no lock"):
        install_command(tmp_path, PipSettings(), python="/usr/bin/python3")


def test_install_command_shows_no_secret(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        f"# antlr is built from source when it is installed\nantlr==4.9.3 --hash=sha256:{B}\n", encoding="utf-8"
    )
    settings = PipSettings(index_url="https://anna:pw@x.example/s", extra_index_urls=("https://y.example/s",))
    argv, env = install_command(tmp_path, settings, python="/env/bin/python", uv="/bin/uv", env={"UV_INDEX": "z"})
    assert argv == [
        *("/bin/uv", "pip", "install", "--python", "/env/bin/python", "--color", "never"),
        *("--index", "pip-extra-1=https://y.example/s", "--default-index", "pip=https://x.example/s"),
        *install_options("requirements.txt", ["antlr"]),
    ]
    assert argv.count("--index-strategy") == 1
    assert env["UV_INDEX_PIP_PASSWORD"] == "pw"
    assert "UV_INDEX" not in env


@pytest.mark.parametrize(
    ("glibc", "platform"),
    [
        ("2.36", "x86_64-manylinux_2_36"),
        ("2.30", "x86_64-manylinux_2_28"),
        ("2.17", "x86_64-manylinux_2_17"),
        ("2.99", "x86_64-manylinux_2_40"),
        (None, "x86_64-manylinux_2_28"),
    ],
)
def test_platform_by_glibc(glibc: str | None, platform: str) -> None:
    assert python_platform("x86_64", glibc) == platform


def test_the_generated_project_quotes_and_hides() -> None:
    problem = Problem(
        python="3.11",
        platform="x86_64-manylinux_2_28",
        pins=(("peft", "0.13.2"), ("torch", "2.6.0")),
        requests=('tool; python_version > "3" and "\\n" == ""',),
        routes=(Route("torch", "2.6.0+cu126", "torch", "torch"),),
        torch_index=named("torch", "https://anna:pw@torch.example/whl/cu126"),
    )
    from envforge.lock.formats import tomllib

    data = tomllib.loads(problem.pyproject())
    assert data["project"]["dependencies"] == [
        *("peft==0.13.2", "torch===2.6.0+cu126"),
        'tool; python_version > "3" and "\\n" == ""',
    ]
    assert data["tool"]["uv"]["sources"] == {"torch": {"index": "torch"}}
    assert data["tool"]["uv"]["index"] == [
        {"name": "torch", "url": "https://torch.example/whl/cu126", "explicit": True}
    ]
    without = tomllib.loads(problem.keep(frozenset({"peft"})).pyproject())
    assert "index" not in without["tool"]["uv"]


def test_redact_keeps_the_rest_of_a_pylock() -> None:
    assert redact(PYLOCK).count("\n") == PYLOCK.count("\n")
