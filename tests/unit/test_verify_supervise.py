"""Stage processes that crash, hang, eat memory or leave: each must end as a finding. Real processes, no torch."""

from __future__ import annotations

import json
import os
import textwrap
import time
from pathlib import Path

import pytest

from envforge.verify.process import Run, run_stages
from envforge.verify.record import FAIL, PASS, SKIP, Recorder, Skip, read_events
from envforge.verify.settings import Settings
from envforge.verify.supervise import Layer, run_layer, run_layers, skipped, status_of

STAGES = """
    import os, signal, subprocess, sys, time

    def good(settings, recorder):
        with recorder.check("one") as check:
            check.figure(pid=os.getpid(), blocking=os.environ.get("CUDA_LAUNCH_BLOCKING"))
            check.say("fine")
        recorder.note("losses", [2.0, 1.0])

    def aborts(settings, recorder):
        with recorder.check("before"):
            pass
        with recorder.check("fragile"):
            os.abort()

    def killed(settings, recorder):
        with recorder.check("fragile"):
            os.kill(os.getpid(), signal.SIGKILL)

    def hangs(settings, recorder):
        with recorder.check("before"):
            pass
        with recorder.check("endless"):
            time.sleep(600)

    def hogs(settings, recorder):
        with recorder.check("greedy"):
            held = bytearray(os.urandom(1024)) * (400 * 1024)
            time.sleep(600)

    def leaves(settings, recorder):
        print("RuntimeError: CUDA error: device-side assert triggered", file=sys.stderr)
        with recorder.check("unfinished"):
            os._exit(0)

    def raises_outside(settings, recorder):
        raise ValueError("outside of any check")

    def raises_inside(settings, recorder):
        with recorder.check("inner"):
            raise ValueError("inside of a check")

    def poor(settings, recorder):
        from envforge.verify.record import Fail
        with recorder.check("figure"):
            raise Fail("the figure is not good enough")

    def once(settings, recorder):
        flag = os.path.join(settings.workdir, "flag")
        with recorder.check("flaky"):
            if not os.path.exists(flag):
                open(flag, "w").close()
                raise RuntimeError("only the first time")

    def slow(settings, recorder):
        with recorder.check("nap") as check:
            check.figure(pid=os.getpid())
            time.sleep(1.5)

    def vanishes(settings, recorder):
        os._exit(0)

    def keeps(settings, recorder):
        from envforge.verify import share
        with recorder.check("keep") as check:
            check.figure(pid=os.getpid(), found=share.take("thing"))
            share.keep("thing", "left by an earlier layer")
            print("a line of " + recorder.layer)

    def orphan(settings, recorder):
        with recorder.check("child") as check:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            check.figure(child=child.pid)
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings whose layers can be any function of the module above."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "stages_of_test.py").write_text(textwrap.dedent(STAGES))
    monkeypatch.setenv("PYTHONPATH", str(code))
    work = tmp_path / "work"
    work.mkdir()
    return Settings(workdir=str(work))


def run_stage(name: str, settings: Settings) -> Run:
    """One run of one layer."""
    (run,) = run_stages([name], settings)
    return run


def aim(settings: Settings, function: str) -> Settings:
    """The chat layer becomes `function`."""
    settings.targets = {"chat": f"stages_of_test:{function}"}
    return settings


def test_a_good_stage_reports_its_checks_and_notes(settings: Settings) -> None:
    layer = run_layer("chat", aim(settings, "good"))
    assert layer.status == PASS
    assert [check.id for check in layer.checks] == ["chat.one"]
    assert layer.checks[0].figures["pid"] != os.getpid()
    assert layer.checks[0].figures["blocking"] is None
    assert layer.notes == {"losses": [2.0, 1.0]}
    assert len(layer.runs) == 1


@pytest.mark.parametrize(("function", "signal_name"), [("aborts", "SIGABRT"), ("killed", "SIGKILL")])
def test_a_crash_is_a_finding_and_names_the_check_it_died_in(
    settings: Settings, function: str, signal_name: str
) -> None:
    layer = run_layer("chat", aim(settings, function))
    assert layer.status == FAIL
    failed = [check for check in layer.checks if check.status == FAIL]
    assert failed[0].id == "chat.fragile"
    assert signal_name in failed[0].text
    # Something broke, so it ran once more, in another process, with the variable set; both ends are kept.
    assert [run.launch_blocking for run in layer.runs] == [False, True]
    assert all(run.outcome == "crash" and run.signal == signal_name for run in layer.runs)


def test_checks_made_before_a_crash_are_kept(settings: Settings) -> None:
    layer = run_layer("chat", aim(settings, "aborts"))
    assert layer.checks[0].id == "chat.before" and layer.checks[0].status == PASS


def test_a_hang_is_ended_at_its_limit_and_not_run_again_without_a_gpu(settings: Settings) -> None:
    settings.limits["chat"] = 2.0
    start = time.monotonic()
    layer = run_layer("chat", aim(settings, "hangs"))
    assert time.monotonic() - start < 60
    assert layer.status == FAIL and len(layer.runs) == 1
    run = layer.runs[0]
    assert run.outcome == "hang" and run.died_in == "chat.endless"
    assert "no end within 2 s" in layer.checks[-1].text
    assert "in hangs" in run.log_tail  # faulthandler shows where it stood


def test_too_much_memory_ends_the_stage(settings: Settings) -> None:
    settings.memory_limit_mib = 200
    run = run_stage("chat", aim(settings, "hogs"))
    assert run.outcome == "memory" and run.failed
    assert "limit of 200 MiB" in run.checks[-1].text
    assert run.peak_mib > 200


def test_a_process_that_leaves_in_the_middle_of_a_check_did_not_pass(settings: Settings) -> None:
    run = run_stage("chat", aim(settings, "leaves"))
    assert run.failed and run.outcome == "exit" and run.died_in == "chat.unfinished"
    assert "device-side assert triggered" in run.checks[-1].text


def test_an_exception_outside_of_checks_fails_the_stage(settings: Settings) -> None:
    run = run_stage("chat", aim(settings, "raises_outside"))
    assert run.outcome == "exit" and "ValueError: outside of any check" in run.error


def test_an_exception_inside_of_a_check_keeps_its_traceback(settings: Settings) -> None:
    layer = run_layer("chat", aim(settings, "raises_inside"))
    assert layer.checks[0].text == "ValueError: inside of a check"
    assert "raises_inside" in layer.checks[0].error
    rerun = layer.checks[-1]
    assert rerun.id == "chat.rerun" and "same way" in rerun.text
    assert rerun.figures["cuda_launch_blocking"] is False  # no GPU: told, not claimed


def test_a_poor_figure_is_not_run_again_without_a_gpu(settings: Settings) -> None:
    layer = run_layer("chat", aim(settings, "poor"))
    assert layer.status == FAIL and len(layer.runs) == 1


def test_a_failure_that_does_not_repeat_stays_a_failure(settings: Settings) -> None:
    layer = run_layer("chat", aim(settings, "once"))
    assert layer.status == FAIL
    assert "does not repeat" in layer.checks[-1].text


def test_with_a_gpu_every_failure_is_run_again_with_launch_blocking(settings: Settings) -> None:
    settings.device = "cuda"  # stands in for a GPU: only the supervisor's decision is tested
    layer = run_layer("chat", aim(settings, "poor"))
    assert [run.launch_blocking for run in layer.runs] == [False, True]
    blocking = run_stage("chat", aim(Settings(workdir=settings.workdir, launch_blocking=True), "good"))
    assert blocking.checks[0].figures["blocking"] == "1"


def test_what_a_stage_started_ends_with_it(settings: Settings) -> None:
    run = run_stage("chat", aim(settings, "orphan"))
    child = run.checks[0].figures["child"]
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break  # ended, not yet reaped by init
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def each(settings: Settings, **functions: str) -> Settings:
    """Layers by name become these functions."""
    settings.targets = {layer: f"stages_of_test:{function}" for layer, function in functions.items()}
    return settings


def test_layers_share_a_process_and_what_they_leave_as_long_as_nothing_fails(settings: Settings) -> None:
    layers = run_layers(["data", "chat"], each(settings, data="keeps", chat="keeps"))
    first, second = (layer.checks[0].figures for layer in layers)
    assert first["pid"] == second["pid"] != os.getpid()
    assert (first["found"], second["found"]) == (None, "left by an earlier layer")
    assert "a line of data" in layers[0].runs[0].log_tail and "a line of chat" in layers[1].runs[0].log_tail
    assert "a line of chat" not in layers[0].runs[0].log_tail
    settings.device = "cuda"  # two copies of a model may not fit there: nothing is kept
    assert run_layers(["data", "chat"], settings)[1].checks[0].figures["found"] is None


@pytest.mark.parametrize("broken", ["aborts", "poor", "vanishes"])
def test_what_follows_a_failure_is_left_out_or_gets_a_fresh_process(settings: Settings, broken: str) -> None:
    each(settings, data="good", chat=broken, effect="good")
    layers = run_layers(["data", "chat", "effect"], settings)
    assert [layer.status for layer in layers] == [PASS, FAIL, SKIP]
    assert "the chat layer failed" in layers[2].checks[0].text
    layers = run_layers(["data", "chat", "effect"], settings, keep_going=True)
    assert [layer.status for layer in layers] == [PASS, FAIL, PASS]
    assert layers[0].checks[0].figures["pid"] != layers[2].checks[0].figures["pid"]


def test_each_layer_has_its_own_time(settings: Settings) -> None:
    settings.limits.update(data=4.0, chat=4.0, effect=4.0)
    layers = run_layers(["data", "chat", "effect"], each(settings, data="slow", chat="slow", effect="slow"))
    assert [layer.status for layer in layers] == [PASS] * 3  # 4.5 s together
    assert all(1.4 < layer.runs[0].seconds < 4 for layer in layers[1:])
    settings.limits["chat"] = 1.0
    layers = run_layers(["data", "chat"], settings)
    assert [layer.status for layer in layers] == [PASS, FAIL] and layers[1].runs[0].outcome == "hang"


def test_events_survive_a_line_that_was_cut(tmp_path: Path) -> None:
    sink = tmp_path / "events"
    recorder = Recorder("data", sink)
    with recorder.check("a"):
        pass
    with recorder.check("b"):
        raise Skip("not here")
    with sink.open("a") as file:
        file.write('{"event": "begin", "id": "data.c"}\n{"event": "end", "che')
    (story,) = read_events(sink)
    assert [(check.id, check.status) for check in story.checks] == [("data.a", "pass"), ("data.b", "skip")]
    assert story.open_id == "data.c" and story.ended is None


def test_layer_status() -> None:
    assert skipped("effect", "why").status == "skip"
    layer = Layer("chat", status_of([]), [])
    assert layer.status == "pass"
    json.dumps(layer.to_json())
