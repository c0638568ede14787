"""Push, look-up and digests against a real registry (Debian's docker-registry) on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_daemon import CannotStart
from engine_registry import PASSWORD, USER, OwnRegistry, docker_login, own_registry
from standins import WHEELS, lock_of, make_plan, make_spec, offline, options

from envforge.errors import OutsideError, UsageError
from envforge.image.build import build_plan
from envforge.image.engines.docker import DockerEngine
from envforge.image.library import in_registry_books
from envforge.image.registry import Registry, RegistryError, in_registry, parse_reference
from envforge.image.values import BuildResult, Event

pytestmark = [pytest.mark.engine]


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
    assert result.registry == {"reference": name, "digest": remote.digest, "image": image, "pushed": True}
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
