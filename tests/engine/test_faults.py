"""What a build survives: a dying engine, a full disk, a broken index, wrong bytes, Ctrl-C, kill -9, two at once.

After each the same is asked: the right error with its exit code, no image with a name of ours, no process left over.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_base import import_base
from engine_daemon import CannotStart, Daemon, private_daemon
from engine_index import Index, make_wheel
from standins import FILELOCK, TORCH, WHEELS, lock_of, make_plan, make_spec, offline, online, options, own_wheels

from envforge.errors import DiskFullError, EngineError, EnvforgeError, HashMismatchError, IndexUnreachableError
from envforge.image.build import build_plan
from envforge.image.engines.docker import DockerEngine
from envforge.image.values import BuildResult, Event

pytestmark = [pytest.mark.engine]

TESTS = Path(__file__).parent


def named_images(engine: DockerEngine, stack: str) -> list[str]:
    """Names that a stack's images have."""
    return [
        name for image in engine.client.images.list() for name in image.tags if name.startswith(f"envforge/{stack}:")
    ]


def build_from(index: Index, engine: DockerEngine, base: str, stack: str) -> BuildResult:
    """One build from the loopback index, of all that it has."""
    return build_plan(
        make_plan(),
        lock_of(*index.wheels.values()),
        make_spec(name=stack),
        options(online(index), base=base),
        engine=engine,
    )


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Run it in a thread; its error, if any, lands in the list."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, errors


def test_an_engine_that_dies_during_the_build_is_told_as_that(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with private_daemon() as own, Index(*own_wheels("dying")) as index:
            base = import_base(own)
            monkeypatch.setenv("DOCKER_HOST", own.host)
            engine = DockerEngine()
            index.mode = "stall"
            thread, errors = in_background(lambda: build_from(index, engine, base, "dying"))
            index.wait_for_download()
            own.kill()
            thread.join(60)
            assert not thread.is_alive()
            (error,) = errors
            assert isinstance(error, EngineError), error
            assert (error.exit_code, error.id) == (3, "engine-died")
            # The same folder comes up again: stale pid files and sockets of the dead one are not in its way.
            own.start()
            assert named_images(DockerEngine(), "dying") == []
            index.mode = "good"
            assert build_from(index, DockerEngine(), base, "dying").reference in named_images(DockerEngine(), "dying")
    except CannotStart as reason:
        pytest.skip(str(reason))


def test_a_full_disk_is_told_as_that(sealed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    big = make_wheel("big-stack", "1.0", {"big_stack/__init__.py": b"", "big_stack/data": b"\0" * 400_000_000})
    try:
        with private_daemon(tmpfs_mib=450) as own:
            base = import_base(own)
            monkeypatch.setenv("DOCKER_HOST", own.host)
            source = offline(tmp_path / "wheels", TORCH, FILELOCK, big)
            with pytest.raises(DiskFullError) as error:
                build_plan(
                    make_plan(), lock_of(TORCH, FILELOCK, big), make_spec(name="full"), options(source, base=base),
                    engine=DockerEngine(),
                )  # fmt: skip
            assert error.value.exit_code == 3
            assert named_images(DockerEngine(), "full") == []
    except CannotStart as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    ("mode", "kind"), [("cut", IndexUnreachableError), ("corrupt", HashMismatchError)], ids=["cut", "corrupt"]
)
def test_an_index_that_fails_during_the_install_leaves_no_image(
    engine: DockerEngine, base_image: str, mode: str, kind: type[EnvforgeError]
) -> None:
    with Index(*own_wheels(mode)) as index:
        index.mode = mode  # type: ignore[assignment]
        with pytest.raises(kind) as error:
            build_from(index, engine, base_image, f"index-{mode}")
        assert error.value.exit_code == 3
        assert len(error.value.render().splitlines()) <= 8
        assert named_images(engine, f"index-{mode}") == []
        index.mode = "good"
        assert not build_from(index, engine, base_image, f"index-{mode}").reused


def test_an_index_that_is_not_there_is_told_as_that(engine: DockerEngine, base_image: str) -> None:
    with Index() as index:
        pass
    wheels = (make_wheel("never-seen", "1.0"),)  # not in the build cache of another test
    with pytest.raises(IndexUnreachableError) as error:
        build_plan(
            make_plan(pins={}), lock_of(*wheels), make_spec(name="gone"), options(online(index), base=base_image),
            engine=engine,
        )  # fmt: skip
    assert "index" in error.value.cause


DRIVER = """
import json, sys
from pathlib import Path
from envforge.cli.run import run
import typer
from envforge.image.build import build_plan
from envforge.image.values import BuildOptions, InstallSource
from standins import lock_of, make_plan, make_spec, own_wheels
stack, url, base, engine, output = sys.argv[1:6]
app = typer.Typer()

@app.command()
def main() -> None:
    source = InstallSource(uv_config=f'index-url = "{url}"\\n', arguments=("--default-index", url))
    options = BuildOptions(source=source, base=base or None, engine=engine, output=Path(output), verify=False)
    result = build_plan(make_plan(), lock_of(*own_wheels(stack)), make_spec(name=stack), options)
    print(json.dumps(result.to_json()), flush=True)

sys.exit(run(app, []))
"""


def start_build(
    index: Index, base: str, stack: str, engine: str = "docker", output: Path = Path("x")
) -> subprocess.Popen[str]:
    """A build in a process of its own, with the command line's own handling of failures and signals."""
    env = {**os.environ, "PYTHONPATH": str(TESTS), "UV_HTTP_RETRIES": "0"}
    argv = [sys.executable, "-c", DRIVER, stack, index.url, base, engine, str(output)]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children_of(pid: int) -> list[int]:
    """Everything that a process started, and what that started."""
    found: list[int] = []
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    queue = [pid]
    while queue:
        more = parents.get(queue.pop(), [])
        found += more
        queue += more
    return found


def wait_gone(pids: list[int], seconds: float = 30) -> list[int]:
    """Those of the processes that are still there (zombies count as gone)."""

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    return left


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("kind", ["docker", "venv"])
def test_a_stopped_build_leaves_no_process_and_nothing_half_made(
    engine: DockerEngine, base_image: str, tmp_path: Path, kind: str, number: signal.Signals, code: int
) -> None:
    stack = f"stopped-{kind}-{int(number)}"
    with Index(*own_wheels(stack)) as index:
        index.mode = "stall"
        output = tmp_path / "place"
        build = start_build(index, base_image if kind == "docker" else "", stack, kind, output)
        index.wait_for_download()
        children = children_of(build.pid)
        assert children, "the build has no child to leave behind"
        build.send_signal(number)
        _, err = build.communicate(timeout=60)
        assert build.returncode == code
        assert "Traceback" not in err
        assert wait_gone(children) == []
        assert named_images(engine, stack) == []
        if kind == "venv":
            assert not (output / "env").exists()
            assert list(output.glob(".env.*")) == []
        # The lock is free and the way is clear: the next build does the whole work.
        index.mode = "good"
        again = start_build(index, base_image if kind == "docker" else "", stack, kind, output)
        out, err = again.communicate(timeout=180)
        assert again.returncode == 0, err
        assert json.loads(out)["reused"] is False


def test_a_killed_build_is_never_taken_for_a_good_one(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    for kind, base in (("docker", base_image), ("venv", "")):
        stack, output = f"killed-{kind}", tmp_path / kind
        with Index(*own_wheels(stack)) as index:
            index.mode = "stall"
            build = start_build(index, base, stack, kind, output)
            index.wait_for_download()
            children = children_of(build.pid)
            build.kill()
            build.wait()
            # Nobody could take these along; they are ours to end, by id.
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            assert named_images(engine, stack) == []
            index.mode = "good"
            again = start_build(index, base, stack, kind, output)
            out, err = again.communicate(timeout=180)
            assert again.returncode == 0, err
            assert json.loads(out)["reused"] is False
            if kind == "venv":
                assert list(output.glob(".env.*")) == []


def test_two_builds_at_once_do_the_work_once(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    events: list[Event] = []
    results: list[BuildResult] = []

    def one() -> None:
        # Each with an engine of its own, as two processes would have.
        results.append(
            build_plan(
                make_plan(), lock_of(*WHEELS), make_spec(name="race"),
                options(offline(tmp_path / "wheels", *WHEELS), base=base_image), engine=DockerEngine(),
                progress=events.append,
            )
        )  # fmt: skip

    threads = [in_background(one) for _ in range(2)]
    for thread, errors in threads:
        thread.join(180)
        assert errors == []
    assert sorted(result.reused for result in results) == [False, True]
    assert results[0].digest == results[1].digest


def test_an_engine_with_another_ones_leftovers_in_its_folder_starts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Stale pid files that name a living process of somebody else, a dead socket: none of it stops the start."""
    try:
        with private_daemon() as own:
            own.kill()
            (own.folder / "docker.pid").write_text("1")
            containerd = own.folder / "exec" / "containerd"
            containerd.mkdir(parents=True, exist_ok=True)
            (containerd / "containerd.pid").write_text(str(os.getpid()))
            own.start()
            assert own.answers()
    except CannotStart as reason:
        pytest.skip(str(reason))


def test_the_clean_up_ends_its_own_processes_only(daemon: Daemon) -> None:
    try:
        with private_daemon() as own:
            folder, pid = own.folder, own.pid
            assert daemon.answers()
    except CannotStart as reason:
        pytest.skip(str(reason))
    assert not folder.exists()
    assert wait_gone([pid]) == []
    assert daemon.answers()
