"""Images on a real Slurm: a docker image, an OCI bundle through Slurm's own --container, an environment folder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engine_base import BASE, rootfs
from engine_daemon import CannotStart, Daemon
from engine_store import own_store
from environment_folder import CPU, Packages, make_environment, packages, torch_packages
from slurm_cluster import LEFT, Slurm
from test_slurm import HOSTILE, envforge, own_log, status, submit

pytestmark = pytest.mark.engine

ROOT = "/opt/envforge"
TINY = Path(__file__).parents[1] / "model" / "tiny_model.py"


@pytest.fixture(scope="module")
def stack() -> Packages:
    """Packages with torch."""
    found = torch_packages()
    if not {"torch", "transformers", "peft"} <= set(found.pins):
        pytest.skip("torch, transformers and peft are not installed (scripts/test installs them)")
    return found


def python_of(stack: Packages) -> str:
    """Their interpreter."""
    return str(Path(stack.prefix) / "bin" / "python")


LORA = """
import json, os, sys
import torch, torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=2)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
model = DistributedDataParallel(model)
torch.manual_seed(rank)  # each rank has data of its own; the gradients are shared
tokens = torch.randint(0, 64, (2, 16))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
losses = []
for _ in range(8):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
total = sum(p.abs().sum().item() for n, p in model.named_parameters() if "lora_B" in n)
print("TOLD " + json.dumps([rank, world, os.environ["ENVFORGE_NODE"], losses, total]), flush=True)
dist.destroy_process_group()
"""


def told(output: str | Path) -> list[Any]:
    """What ranks said in their own logs, by rank."""
    rows = []
    for path in sorted(Path(output).glob("*-rank*.log")):
        rows += [json.loads(line.partition("TOLD ")[2]) for line in path.read_text().splitlines() if "TOLD " in line]
    return sorted(rows)


@pytest.mark.model
def test_torchrun_trains_a_lora_across_two_nodes(slurm: Slurm, stack: Packages, tmp_path: Path) -> None:
    image = make_environment(tmp_path / "image", these=stack)
    script = tmp_path / "train it.py"
    script.write_text(LORA)
    words = ["--output", tmp_path / "out", "--nodes", "2", "--env", "OMP_NUM_THREADS=1", "--", "torchrun", script]
    row = submit(slurm, image, *words)
    assert slurm.wait(row["job_id"]) == "COMPLETED", envforge(slurm, "job", "logs", row["output"]).stdout[-3000:]
    rows = told(row["output"])
    assert [one[:3] for one in rows] == [[0, 2, "n1"], [1, 2, "n2"]]
    assert all(losses[-1] < losses[0] for *_, losses, _ in rows)
    assert rows[0][3] != rows[1][3]  # data of their own
    assert rows[0][4] == pytest.approx(rows[1][4], rel=1e-5)  # and yet the same weights
    assert rows[0][4] > 0


@pytest.fixture(scope="module")
def docker_image(daemon: Daemon, base_image: str, stack: Packages, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The environment folder as an image in the run's private engine."""
    import docker

    context = tmp_path_factory.mktemp("context")
    make_environment(context / "envforge", these=stack, inside=ROOT)
    plan = json.dumps(json.dumps(json.loads((context / "envforge" / "plan.json").read_text()))).replace("$", "\\$")
    lines = [f"FROM {base_image}", f'COPY ["envforge/", "{ROOT}/"]', "RUN mkdir -p /workspace && chmod 1777 /workspace"]
    lines += [f'ENTRYPOINT ["{ROOT}/bin/envforge-entrypoint"]', "WORKDIR /workspace", "USER 1000:0"]
    lines += [f'LABEL envforge.address="{CPU["address"]}" envforge.plan={plan}']
    (context / "Dockerfile").write_text("\n".join(lines) + "\n")
    client = docker.DockerClient(base_url=daemon.host, timeout=600)
    client.images.build(path=str(context), tag="envforge-test/job:1", network_mode="none")
    client.close()
    return "envforge-test/job:1"


@pytest.mark.model
@pytest.mark.slow
def test_an_image_is_proven_as_a_job_and_the_receipt_comes_home(
    slurm: Slurm, daemon: Daemon, docker_image: str, stack: Packages, tmp_path: Path
) -> None:
    model = tmp_path / "tiny"
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [python_of(stack), TINY, model], env={"PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}, check=False
    )
    assert done.returncode == 0
    words = ["--verify", "--container-tool", "docker", "--output", tmp_path / "out", "--pass", "DOCKER_HOST"]
    words += [*stack.mounts, "--mount", f"{model}:/model", "--env", "OMP_NUM_THREADS=1"]
    words += ["--", "--model", "/model", "--layers", "environment,training"]
    row = submit(slurm, docker_image, *words, DOCKER_HOST=daemon.host)
    assert row["name"] == "verify-job"
    assert slurm.wait(row["job_id"], seconds=500) == "COMPLETED", own_log(row)[-4000:]

    answer = status(slurm, row)
    proof = {"node": "n1", "passed": True, "grade": "full", "digest": row["digest"], "finding": None}
    assert answer["receipts"] == [proof]
    assert row["digest"].startswith("sha256:")
    receipt = json.loads((tmp_path / "out" / "receipt-n1.json").read_text())
    assert receipt["losses"][-1] < receipt["losses"][0]
    assert "preflight n1: ok" in own_log(row)


def test_slurms_own_container_runs_a_bundle_on_every_node(slurm: Slurm, tmp_path: Path) -> None:
    bundle, these = tmp_path / "bundle", packages()
    (bundle / "rootfs").mkdir(parents=True)
    subprocess.run(["tar", "-xf", rootfs(), "-C", bundle / "rootfs"], check=True)
    make_environment(bundle / "rootfs" / "opt" / "envforge", inside=ROOT)
    (bundle / "rootfs" / "workspace").mkdir()
    subprocess.run(["runc", "spec", "--bundle", bundle], check=True)
    config = json.loads((bundle / "config.json").read_text())
    config["process"]["env"] += ["IMAGE_SAYS=hello", "PATH=/nowhere"]
    (bundle / "config.json").write_text(json.dumps(config))
    code = """
import json, os, pathlib, time
rank, place = int(os.environ["RANK"]), pathlib.Path(os.environ["ENVFORGE_OUTPUT"])
(place / f"rank{rank}").touch()
while not (place / f"rank{1 - rank}").exists():  # both run at once, or neither ends
    time.sleep(0.1)
print("TOLD " + json.dumps([rank, int(os.environ["WORLD_SIZE"]), os.environ["ENVFORGE_NODE"], os.environ["WORD"],
                            os.environ["IMAGE_SAYS"], os.path.isdir("/opt/envforge")]))
"""
    words = ["--image-file", bundle, "--output", tmp_path / "out", "--nodes", "2", "--env", 'WORD=it\'s $(id)\n"x"']
    row = submit(slurm, *words, *these.mounts, "--", "python", "-c", code)
    assert row["tool"] == "oci"
    assert slurm.wait(row["job_id"]) == "COMPLETED", own_log(row) + slurm.tail()
    word, said = 'it\'s $(id)\n"x"', "hello"
    assert told(row["output"]) == [[0, 2, "n1", word, said, True], [1, 2, "n2", word, said, True]]
    log = own_log(row)
    assert log.count("preflight n1: ok") == log.count("preflight n2: ok") == 1


def test_a_docker_container_is_ended_with_its_job(
    slurm: Slurm, daemon: Daemon, docker_image: str, stack: Packages, tmp_path: Path
) -> None:
    import docker

    words = ["--container-tool", "docker", "--output", tmp_path / "out", "--pass", "DOCKER_HOST", *stack.mounts]
    code = "import os, time; open(os.environ['ENVFORGE_OUTPUT'] + '/ready', 'w'); time.sleep(300)"
    row = submit(slurm, docker_image, *words, "--", "python", "-c", code, DOCKER_HOST=daemon.host)
    slurm.wait(row["job_id"], lambda word: word not in LEFT or (tmp_path / "out" / "ready").exists())
    client = docker.DockerClient(base_url=daemon.host)
    assert [c.name for c in client.containers.list()] == [f"envforge-{row['job_id']}-1-0"]
    assert envforge(slurm, "job", "cancel", row["output"]).returncode == 0
    assert slurm.wait(row["job_id"]) == "CANCELLED"
    assert client.containers.list() == []
    client.close()


def test_podman_runs_a_job_and_hostile_words_come_through(slurm: Slurm, tmp_path: Path) -> None:
    these = packages()
    image = make_environment(tmp_path / "image", inside=ROOT)
    (tmp_path / "workspace").mkdir()
    code = "import json, os, sys; print('TOLD ' + json.dumps([sys.argv[1:], os.environ['WORD'], os.getcwd()]))"
    try:
        with own_store() as store:
            words = ["--container-tool", "podman", "--output", tmp_path / "out it's", "--workdir", "/workspace"]
            words += [word for name in store for word in ("--pass", name)]
            # The environment comes as a mount: what is tried here is the tool.
            words += [*these.mounts, "--mount", f"{image}:{ROOT}", "--mount", f"{tmp_path}/workspace:/workspace"]
            words += ["--env", f"WORD={HOSTILE[0]}\n{HOSTILE[1]}", "--", "python", "-c", code, *HOSTILE]
            row = submit(slurm, BASE, *words, **store)
            assert slurm.wait(row["job_id"]) == "COMPLETED", own_log(row)
    except CannotStart as reason:
        pytest.skip(str(reason))
    told = next(line for line in own_log(row).splitlines() if line.startswith("TOLD "))
    assert json.loads(told.removeprefix("TOLD ")) == [list(HOSTILE), f"{HOSTILE[0]}\n{HOSTILE[1]}", "/workspace"]
    assert "preflight n1: ok" in own_log(row)
