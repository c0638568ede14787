"""A docker client with buildx, whatever its builder. Stood in for: buildx, by a script that records its words and lets
the engine's own client build; it reports the image as engines on containerd's store do, where two digests differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from standins import WHEELS, lock_of, make_plan, make_spec, offline, options

from envforge.image.build import build_plan
from envforge.image.engines.docker import DockerEngine
from envforge.image.engines.dockercli import find_client

pytestmark = [pytest.mark.engine]

SCRIPT = """#!/bin/sh
case $1 in
--version) echo "Docker version 28.2.2, build x"; exit ;;
buildx) echo github.com/docker/buildx v0.24.0; exit ;;
esac
printf '%s\\n' "$@" >"{words}"
for word; do
    shift
    case $word in
    --load | --provenance=*) ;;
    --metadata-file=*) metadata=${{word#*=}} ;;
    --iidfile=*) iid=${{word#*=}}; set -- "$@" "--iidfile={words}.iid" ;;
    *) set -- "$@" "$word" ;;
    esac
done
"{client}" "$@" || exit
printf 'sha256:%064d' 1 >"$iid"
printf '{{"containerimage.config.digest": "sha256:%064d", "containerimage.digest": "%s"}}' 1 "$(cat "{words}.iid")" \\
    >"$metadata"
"""


def test_buildx_loads_what_its_builder_made(
    engine: DockerEngine, base_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = find_client()
    if real.buildx:
        return  # the client here has buildx itself: every other test goes through it
    script = tmp_path / "docker-with-buildx"
    script.write_text(SCRIPT.format(words=tmp_path / "words", client=real.path))
    script.chmod(0o755)
    monkeypatch.setenv("ENVFORGE_DOCKER", str(script))
    made = options(offline(tmp_path / "wheels", *WHEELS), base=base_image)
    result = build_plan(make_plan(), lock_of(*WHEELS), make_spec(name="buildx"), made, engine=engine)
    assert {"--load", "--provenance=false"} <= set((tmp_path / "words").read_text().split())
    assert engine.run(result.reference, ["python", "-c", "import torch"]).code == 0
