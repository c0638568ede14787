"""The wheel holds what the repository has, built directly or through the source archive; both kinds of install work."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(kind: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel from the checkout, and the one from the source archive of the checkout."""
    place = tmp_path_factory.mktemp("dist")
    direct = build("wheel", ROOT, place / "direct")
    archive = build("sdist", ROOT, place / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(place / "unpacked", filter="data") if sys.version_info >= (3, 12) else tar.extractall(
            place / "unpacked"
        )
    (source,) = (place / "unpacked").iterdir()
    return direct, build("wheel", source, place / "through")


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_both_ways_hold_the_same_files(wheels: tuple[Path, Path]) -> None:
    direct, through = map(names, wheels)
    assert direct == through


def test_everything_is_under_the_one_namespace_and_nothing_is_packed_twice(wheels: tuple[Path, Path]) -> None:
    held = names(wheels[0])
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"envforge"}
    data = ("matrix/data/torch.yaml", "matrix/releases/torch.json", "templates/Dockerfile.j2", "schemas/image.json")
    for wanted in (*data, "resolver/solve.py", "images/unsloth/image.yaml", "verify/__main__.py", "py.typed"):
        assert f"envforge/{wanted}" in held, wanted
    assert len(held) == len(zipfile.ZipFile(wheels[0]).namelist())


def test_a_plain_install_answers(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "site"
    zipfile.ZipFile(wheels[0]).extractall(target)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import envforge; from envforge.cli import main; "
        "assert 'site' in envforge.__file__, envforge.__file__; "
        "main(['resolve', 'torch', '--driver', 'none', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and '"status": "ok"' in done.stdout, done.stderr


def test_the_editable_install_is_the_checkout() -> None:
    import envforge
    import envforge.resolver

    assert Path(envforge.__file__).resolve().is_relative_to(ROOT / "src")
    assert Path(envforge.resolver.__file__).resolve() == ROOT / "resolver" / "__init__.py"
