"""Push, look-up and digests against a real registry (Debian's docker-registry) on loopback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from engine_daemon import CannotStart
from engine_registry import PASSWORD, USER, OwnRegistry, docker_login, own_registry
from standins import WHEELS, lock_of, make_plan, make_spec, offline, options

from envforge.cli.app import application
from envforge.cli.run import run
from envforge.errors import OutsideError, UsageError
from envforge.image import proofs
from envforge.image.artifacts import INDEX, MANIFEST, documents, referrers
from envforge.image.build import build_plan
from envforge.image.engines import RunResult
from envforge.image.engines.docker import DockerEngine
from envforge.image.library import in_registry_books
from envforge.image.proofs import KIND, get_proof, known_proof, put_proof
from envforge.image.publish import BILL
from envforge.image.registry import Registry, RegistryError, in_registry, parse_reference
from envforge.image.values import BuildResult, Event

pytestmark = [pytest.mark.engine]
OCI = {"Accept": f"{MANIFEST}, {INDEX}"}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRegistry]:
    """An open registry."""
    try:
        with own_registry(tmp_path_factory.mktemp("registry")) as own:
            yield own
    except CannotStart as reason:
        pytest.skip(str(reason))


def build(base: str, tmp: Path, name: str, events: list[Event] | None = None, **changes: object) -> BuildResult:
    """One image of stand-ins, by an engine object of its own, as another process would have."""
    source = offline(tmp / "wheels", *WHEELS)
    progress = (events if events is not None else []).append
    made = options(source, base=base, **changes)
    return build_plan(
        make_plan(), lock_of(*WHEELS), make_spec(name=name), made, engine=DockerEngine(), progress=progress
    )


def forget(engine: DockerEngine, result: BuildResult) -> None:
    """Take the image out of the engine: this is another machine from here on."""
    engine.client.images.remove(result.digest, force=True)
    assert engine.find("envforge.address", result.address) == ()


def test_what_was_pushed_is_found_by_tag_and_label_and_not_built_again(
    engine: DockerEngine, base_image: str, registry: OwnRegistry, tmp_path: Path
) -> None:
    team = f"{registry.host}/team"
    first = build(base_image, tmp_path, "pushed", registry=team, push=True)
    assert first.registry is not None
    assert first.registry["pushed"] is True
    name = f"{team}/pushed:2.13.0-cpu-{first.address[:12]}"
    assert first.registry["reference"] == name
    assert first.to_json()["registry"]["image"] == f"{team}/pushed@{first.registry['digest']}"
    # The digest is that of the manifest in the registry, by another's word; the way's name is gone here.
    remote = Registry(registry.host).find(parse_reference(name))
    assert remote is not None
    assert (remote.digest, remote.config) == (first.registry["digest"], first.digest)
    assert remote.labels["envforge.address"] == first.address
    kept = engine.inspect(first.digest)
    assert kept is not None
    assert kept.names == (first.reference,)

    again = build(base_image, tmp_path, "pushed", registry=team, push=True)
    assert again.reused
    assert again.registry == {**first.registry, "pushed": False}

    # A tag of another kind beside it is not ours.
    engine.push(kept, f"{team}/pushed:latest")
    (book,) = in_registry_books(team, ["pushed", "no-such-stack"])
    assert (book.name, book.address) == (first.registry["image"], first.address)

    forget(engine, first)
    events: list[Event] = []
    elsewhere = build(base_image, tmp_path, "pushed", events, registry=team)
    assert (elsewhere.reused, elsewhere.here) == (True, False)
    assert elsewhere.reference == first.registry["image"]
    assert elsewhere.digest == first.digest
    assert engine.find("envforge.address", first.address) == ()
    assert not any("installing" in event.text for event in events)
    # With a name to give it is fetched, not built.
    fetched = build(base_image, tmp_path, "pushed", events, registry=team, tag="mine:1")
    assert (fetched.reused, fetched.here, fetched.digest) == (True, True, first.digest)
    assert not any("installing" in event.text for event in events)


class Proving(DockerEngine):
    """Stands in for the proof, which stand-in packages cannot pass: it leaves a receipt as `verify` does."""

    grade = "full"

    def run(self, reference: str, argv: list[str], **more: Any) -> RunResult:
        if argv[0] != "verify":
            return super().run(reference, argv, **more)
        receipt = {"kind": "receipt", "passed": True, "grade": self.grade, "device": "cpu", "started": "2026-01-01"}
        return RunResult(0, "passed", json.dumps(receipt).encode())


def proven(base: str, tmp: Path, name: str, team: str, engine: DockerEngine, **changes: object) -> BuildResult:
    """An image that was built, proven and pushed."""
    (tmp / "model").mkdir(exist_ok=True)
    for part in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (tmp / "model" / part).write_text("{}")
    made = options(offline(tmp / "wheels", *WHEELS), base=base, registry=team, push=True, verify=True)
    made = replace(made, model=str(tmp / "model"), **changes)  # type: ignore[arg-type]
    return build_plan(make_plan(), lock_of(*WHEELS), make_spec(name=name), made, engine=engine)


def test_the_receipt_travels_with_the_image(
    engine: DockerEngine,
    base_image: str,
    registry: OwnRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    team = f"{registry.host}/proven"
    first = proven(base_image, tmp_path, "proven", team, Proving())
    assert first.registry is not None and first.warnings == ()
    artifact, image = first.registry["proof"], first.registry["image"]
    client = Registry(registry.host)
    remote = client.find(parse_reference(image))
    assert remote is not None
    # As any other client of the distribution protocol finds it: a tag that is the digest lists it (no referrers here).
    place = f"http://{registry.host}/v2/proven/proven/manifests"
    index = requests.get(f"{place}/sha256-{remote.digest[7:]}", headers=OCI, timeout=30)
    row, bill = index.json()["manifests"]
    assert (bill["artifactType"], bill["digest"]) == (BILL, first.registry["sbom"])
    assert (row["digest"], row["artifactType"], row["annotations"]["envforge.grade"]) == (artifact, KIND, "full")
    got = requests.get(f"{place}/{artifact}", headers=OCI, timeout=30)
    assert got.json()["subject"] == {"mediaType": remote.media, "digest": remote.digest, "size": remote.length}
    receipt = get_proof(client, remote)
    assert receipt is not None and receipt["image"] == {"digest": first.digest, "address": first.address}
    assert str(tmp_path) not in json.dumps(receipt), "where the model lies here is nobody's business"

    again = proven(base_image, tmp_path, "proven", team, Proving())
    assert again.registry == {**first.registry, "pushed": False}
    assert len(referrers(client, remote)) == 2, "the same receipt and list are there once"

    # Another machine: no image, no state.
    forget(engine, first)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other machine"))
    (book,) = in_registry_books(team, ["proven"])
    assert (book.name, book.proof) == (image, "full")
    elsewhere = build(base_image, tmp_path, "proven", registry=team)
    assert (elsewhere.here, elsewhere.grade) == (False, "full")
    assert elsewhere.proof is not None and elsewhere.receipt is not None and elsewhere.receipt.is_file()

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "third machine"))
    assert run(application(), ["images", "adopt", image, "--engine", "docker"]) == 0
    assert "its receipt says that it was proven (full, 2026-01-01)" in capsys.readouterr().out
    info = engine.inspect(image)
    assert info is not None
    kept_here = known_proof(info)
    assert kept_here is not None and kept_here[1] == registry.host, "without asking the registry, and still its word"
    run(application(), ["images", "list", "--engine", "docker"])
    assert f"{first.reference}" in (listed := capsys.readouterr().out) and "proof full" in listed

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "fourth machine"))
    run(application(), ["check", image, "--driver", "none", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["proof"] == {"grade": "full", "device": "cpu", "started": "2026-01-01", "from": registry.host}
    # Beside another image a receipt says nothing.
    other = replace(remote, config="sha256:" + "0" * 64, digest=remote.digest)
    put_proof(client, replace(other), {"passed": True, "grade": "full", "kind": "receipt"})
    assert len(referrers(client, remote)) == 3
    kept = get_proof(client, remote)
    assert kept is not None and kept["image"]["digest"] == first.digest


def test_a_better_receipt_counts_and_a_registry_without_room_for_it_is_a_warning(
    engine: DockerEngine, base_image: str, registry: OwnRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = f"{registry.host}/graded"
    result = proven(base_image, tmp_path, "graded", team, Proving())
    assert result.registry is not None
    client = Registry(registry.host)
    remote = client.find(parse_reference(result.registry["image"]))
    assert remote is not None
    put_proof(client, remote, {"passed": True, "grade": "static", "kind": "receipt"})
    put_proof(client, remote, {"passed": False, "grade": "full", "kind": "receipt"})
    assert len(referrers(client, remote)) == 4
    best = get_proof(client, remote)
    assert best is not None and best["grade"] == "full" and best["passed"]

    def refuse(*args: object, **more: object) -> str:
        raise RegistryError("no artifacts here (HTTP 415)", denied=False)

    monkeypatch.setattr(proofs, "attach", refuse)
    late = proven(base_image, tmp_path, "graded", team, Proving())
    assert late.registry is not None and "proof" not in late.registry
    assert late.warnings == ("the image is there, and not what is known of it: no artifacts here (HTTP 415)",)


def test_a_tag_of_ours_with_another_address_is_not_taken_for_the_same(
    engine: DockerEngine, base_image: str, registry: OwnRegistry, tmp_path: Path
) -> None:
    team = f"{registry.host}/other"
    first = build(base_image, tmp_path, "impostor", registry=team, push=True)
    assert first.registry is not None
    # Somebody puts something else under our name.
    image = engine.inspect(base_image)
    assert image is not None
    engine.push(image, first.registry["reference"])
    forget(engine, first)
    assert not build(base_image, tmp_path, "impostor", registry=team).reused


def test_a_name_of_ones_own_can_be_pushed_without_a_registry_setting(
    engine: DockerEngine, base_image: str, registry: OwnRegistry, tmp_path: Path
) -> None:
    name = f"{registry.host}/me/thing:v1"
    result = build(base_image, tmp_path, "own-name", tag=name, push=True)
    remote = Registry(registry.host).find(parse_reference(name))
    assert remote is not None
    image = f"{registry.host}/me/thing@{remote.digest}"
    assert result.registry is not None
    bill = result.registry.pop("sbom")
    assert result.registry == {"reference": name, "digest": remote.digest, "image": image, "pushed": True}
    (text,) = documents(Registry(registry.host), remote, BILL)
    assert json.loads(text)["bomFormat"] == "CycloneDX" and bill in {
        row["digest"] for row in referrers(Registry(registry.host), remote)
    }
    with pytest.raises(UsageError, match="no registry is known"):
        build(base_image, tmp_path, "own-name", push=True)


@pytest.mark.parametrize("helper", [False, True], ids=["auths", "credHelpers"])
def test_credentials_come_from_the_docker_configuration(
    engine: DockerEngine,
    base_image: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    helper: bool,
) -> None:
    config = Path(os.environ["DOCKER_CONFIG"])
    try:
        with own_registry(tmp_path / "locked", locked=True) as registry:
            # Without credentials: refused in the registry's own words, and the image stays.
            with pytest.raises(RegistryError) as error:
                build(base_image, tmp_path, "locked", registry=registry.host, push=True)
            assert error.value.denied
            assert error.value.exit_code == 3
            assert "no basic auth credentials" in error.value.cause or "authentication required" in error.value.cause
            kept = error.value.kept
            assert isinstance(kept, BuildResult)
            assert kept.reference in error.value.hint
            assert engine.inspect(kept.reference) is not None

            docker_login(config, registry.host, helper=helper)
            if helper:
                program = tmp_path / "bin" / "docker-credential-envforge-test"
                program.parent.mkdir()
                answer = f'{{"ServerURL": "x", "Username": "{USER}", "Secret": "{PASSWORD}"}}'
                program.write_text(f"#!/bin/sh\ncat >/dev/null\nprintf '%s' '{answer}'\n")
                program.chmod(0o755)
                monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
            result = build(base_image, tmp_path, "locked", registry=registry.host, push=True)
            assert result.reused
            assert result.registry is not None
            assert result.registry["pushed"] is True
            again = build(base_image, tmp_path, "locked", registry=registry.host, push=True)
            assert again.registry is not None
            assert again.registry["pushed"] is False
    except CannotStart as reason:
        pytest.skip(str(reason))


def test_a_registry_that_refuses_or_is_gone_keeps_image_and_result(
    engine: DockerEngine, base_image: str, tmp_path: Path
) -> None:
    try:
        with own_registry(tmp_path / "closed", read_only=True) as registry:
            with pytest.raises(RegistryError) as error:
                build(base_image, tmp_path, "refused", registry=registry.host, push=True)
            assert error.value.exit_code == 3
            assert registry.host in error.value.cause
            assert "Method not allowed" in error.value.cause  # its own words
            kept = error.value.kept
            assert isinstance(kept, BuildResult)
            assert engine.inspect(kept.reference) is not None
            assert [name for name in engine.client.images.get(kept.digest).tags if registry.host in name] == []
    except CannotStart as reason:
        pytest.skip(str(reason))
    # Gone: with --push it is told before the work; without, the build goes on and says so.
    with pytest.raises(RegistryError, match="Connection refused") as gone:
        build(base_image, tmp_path, "gone", registry=registry.host, push=True)
    assert gone.value.kept is None
    assert "without --push" in gone.value.hint
    result = build(base_image, tmp_path, "gone", registry=registry.host)
    assert not result.reused
    assert "Connection refused" in result.warnings[0]
    with pytest.raises(RegistryError, match="Connection refused") as late:
        build(base_image, tmp_path, "gone", registry=registry.host, push=True)
    assert isinstance(late.value.kept, BuildResult)
    assert result.reference in late.value.hint


def test_what_answers_and_is_no_registry_is_told(registry: OwnRegistry) -> None:
    reference = replace(in_registry(registry.host, "envforge/none:1"), path="no/such")
    assert Registry(registry.host).find(reference) is None
    assert Registry(registry.host).tags(reference) == ()
    with pytest.raises(OutsideError):
        Registry("127.0.0.1:9").find(replace(reference, host="127.0.0.1:9"))
