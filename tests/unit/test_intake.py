"""Requests as users have them: words, requirement files with includes and hashes, pyproject files, specs."""

from __future__ import annotations

from pathlib import Path

import pytest

from envforge.errors import DataError, UsageError
from envforge.intake import read_intake, read_requirements
from envforge.spec import load_spec


def test_requirement_files_with_includes_hashes_and_comments(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("numpy<2  # torch 2.1\n")
    (tmp_path / "limits.txt").write_text("peft<0.14\n")
    (tmp_path / "r.txt").write_text(
        "# a comment\n-r base.txt\n-c limits.txt\n--index-url https://example.invalid/simple\n"
        "torch==2.1.2 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\ntransformers>=4.36 ; python_version>='3.8'\n"
    )
    requests, limits = read_requirements(tmp_path / "r.txt")
    assert [r.text.split(";")[0].strip() for r in requests] == ["numpy<2", "torch==2.1.2", "transformers>=4.36"]
    assert [r.text for r in limits] == ["peft<0.14"]


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16"])
def test_files_that_windows_wrote(codec: str, tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_bytes("torch\r\npeft==0.13.2\r\n".encode(codec))
    assert [r.name for r in read_requirements(tmp_path / "r.txt")[0]] == ["torch", "peft"]


def test_folders_and_editable_lines_are_requests_by_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/pyproject.toml").write_text('[project]\nname = "My_Code"\nversion = "1"\n')
    commit = "0" * 40
    (tmp_path / "r.txt").write_text(f"-e ./mine[train]\n-e git+https://x.invalid/a@{commit}#egg=A_b\n./mine\n")
    requests, _ = read_requirements(tmp_path / "r.txt")
    assert [(r.name, r.extras, r.url) for r in requests] == [
        ("my-code", ("train",), "./mine"),
        ("a-b", (), f"git+https://x.invalid/a@{commit}"),
        ("my-code", (), "./mine"),
    ]
    (tmp_path / "r.txt").write_text("torch\n-e ./other\n")
    with pytest.raises(UsageError, match=r"r\.txt:2") as caught:
        read_requirements(tmp_path / "r.txt")
    assert "NAME @ ./other" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("environment.yml", "name: x\ndependencies:\n- pip:\n  - torch\n", "requirements file"),
        ("pylock.toml", 'lock-version = "1.0"\n', "--from"),
        ("uv.lock", 'version = 1\n[[package]]\nname = "torch"\n', "--from"),
    ],
)
def test_files_of_another_kind(name: str, text: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name) as caught:
        read_requirements(tmp_path / name)
    assert hint in caught.value.hint


def test_a_folder_that_is_no_project_says_what_it_can_be(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(UsageError) as caught:
        read_intake([str(tmp_path)], [], None)
    assert "pyproject.toml" in caught.value.hint and "x @ " in caught.value.hint
    for word in ("x @ ./not-there", "./not-there", "not-there/", "/not/there.whl", "./" + "a" * 400):
        with pytest.raises(UsageError, match="no such"):
            read_intake([word], [], None)


def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    path.write_text("torch\n\ntransformers>>4\n")
    with pytest.raises(UsageError, match=r"r\.txt:3"):
        read_requirements(path)


def test_a_file_that_includes_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    path.write_text("-r r.txt\n")
    with pytest.raises(UsageError, match="includes itself"):
        read_requirements(path)


def test_pyproject_dependencies(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text('[project]\nname = "x"\ndependencies = ["peft==0.13.2"]\n')
    assert read_requirements(path)[0][0].pinned == "0.13.2"


def test_nothing_asked_for_is_an_error() -> None:
    with pytest.raises(UsageError, match="nothing is asked for"):
        read_intake([], [], None)


def test_a_project_folder_brings_its_spec(tmp_path: Path) -> None:
    (tmp_path / "image.yaml").write_text('schema: 1\nname: mine\nrequests: ["torch==2.6.0"]\n')
    intake = read_intake([str(tmp_path), "peft"], [], None)
    assert [r.text for r in intake.requests(cpu=False)] == ["torch==2.6.0", "peft"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("schema: 1\nname: x\nrequests: [torch]\nrequets: []\n", "4: .*requets.*requests"),
        ("schema: 1\nname: x\nname: y\nrequests: [torch]\n", "3: .*name"),
        ("schema: 1\nname: x\nrequests: torch\n", "3: "),
        ('schema: 1\nname: x\nrequests: [torch]\nenv: {A: "one\\ntwo"}\n', "4: .*line break"),
        ('schema: 1\nname: x\nrequests: [torch]\nenv: {A: "one\\u2028RUN id"}\n', "4: .*line break.*2028"),
        ('schema: 1\nname: x\nrequests: [torch]\nfiles: {"/a\\nRUN id": b}\n', "4: .*line break"),
        ("schema: 1\nname: x\nrequests: [torch]\npython: '3.99'\n", "4: .*3.99"),
        ("schema: 1\nname: x\nrequests: [&a torch, *a]\n", "3: "),
        ("schema: 1\nname: x\nrequests: ['torch>>2']\n", "3: .*torch>>2"),
        ("schema: 1\nname: x\nrequests: [torch]\nfiles: {/etc/x: ../../secret}\n", "4: "),
        ("schema: 1\nname: x\nrequests: [torch]\nremote_code: {allow: true}\n", "4: .*revision"),
    ],
)
def test_faults_in_a_spec_are_named_by_line_and_field(tmp_path: Path, body: str, said: str) -> None:
    path = tmp_path / "image.yaml"
    path.write_text(body)
    with pytest.raises(DataError, match=said):
        load_spec(path)


def test_a_line_that_stands_twice_counts_once_where_it_stood_first(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("numpy<2\nTorch>=2\npeft\ntorch >= 2\nnumpy<1.26\n")
    lines = read_intake(["torch>=2"], [path], None).lines
    assert [(line.name, line.specifier, line.origin) for line in lines] == [
        ("torch", ">=2", "command line"),
        ("numpy", "<2", f"{path}:1"),
        ("peft", "", f"{path}:3"),
        ("numpy", "<1.26", f"{path}:5"),
    ]


def test_a_relative_path_in_a_spec_starts_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from envforge.cli.addresses import _from

    (tmp_path / "image.yaml").write_text('schema: 1\nname: x\nrequests: ["torch", "mine @ ./mine"]\n')
    monkeypatch.chdir("/")
    mine = load_spec(tmp_path / "image.yaml").requests[1]
    assert mine.origin.endswith("image.yaml:3")
    assert _from(tmp_path, mine) == "./mine"


def test_lines_far_too_long_are_refused_before_they_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes make lines long; a line of megabytes is none, and every search through it costs."""
    hashes = " ".join(f"--hash=sha256:{i:064x}" for i in range(400))
    (tmp_path / "r.txt").write_text(f"numpy==1.26.4 {hashes}\n")
    assert read_requirements(tmp_path / "r.txt")[0][0].pinned == "1.26.4"
    (tmp_path / "r.txt").write_text("./" + "a" * 3_000_000)
    monkeypatch.setattr("envforge.intake._named", lambda *_: pytest.fail("searched"))
    with pytest.raises(UsageError, match="too long"):
        read_requirements(tmp_path / "r.txt")


@pytest.mark.skipif(not Path("/dev/zero").is_char_device(), reason="this system has no /dev/zero")
def test_a_file_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Path, "read_bytes")  # it would read for ever
    with pytest.raises(UsageError, match="no requirements file is that large"):
        read_intake([], [Path("/dev/zero")], None)
