"""The system packages of a GPU image, from the base's real archive: a compiler that works, RDMA's user libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_index import make_wheel
from standins import WHEELS, lock_of, make_plan, make_spec, offline, options

from envforge.image.build import build_plan
from envforge.image.engines.docker import DockerEngine
from envforge.resolver.plan import Target

pytestmark = [pytest.mark.engine, pytest.mark.index, pytest.mark.slow]

# What Triton does when its first kernel runs: a small extension against Python's headers.
LAUNCHER = r"""
import pathlib, subprocess, sysconfig, tempfile
with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder, "launcher.c")
    source.write_text('''
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
''')
    words = ["gcc", str(source), "-O3", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    subprocess.run([*words, "-o", f"{folder}/launcher.so"], check=True)
    import sys
    sys.path.insert(0, folder)
    import launcher
import ctypes
for name in ("libibverbs.so.1", "librdmacm.so.1"):
    ctypes.CDLL(name)
print("fine")
"""


def test_a_gpu_image_compiles_and_speaks_rdma(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    wheels = (*WHEELS, make_wheel("triton", "3.3.1", {"triton/include/cuda.h": b"x", "triton/__init__.py": b""}))
    target = Target("x86_64", "2.36", "550.54.15", "525.60.13", ("8.0",))
    plan = make_plan(variant="cu126", tier="minor", cuda="12.6", target=target)
    result = build_plan(
        plan,
        lock_of(*wheels),
        make_spec(name="system"),
        options(offline(tmp_path / "wheels", *wheels), base=base_image),
        engine=engine,
    )
    done = engine.run(result.reference, ["python", "-c", LAUNCHER], env={"ENVFORGE_PREFLIGHT": "off"})
    assert done.output.splitlines()[-1] == "fine", done.output
    listing = engine.run(
        result.reference,
        ["sh", "-c", "ls /var/lib/apt/lists /var/cache/apt; find /usr/lib -name 'libpython*.a'; "
         "ls /opt/envforge/env/lib/python3.11/site-packages/triton/include"],
        user="0:0", env={"ENVFORGE_PREFLIGHT": "off"},
    ).output.split()  # fmt: skip
    assert not [name for name in listing if name.endswith((".a", ".bin", ".deb")) or name.startswith("deb.")]
    assert "cuda.h" in listing, "what a compiler reads at run time stays"
    # The versions stand in the history, so the same plan is the same image tomorrow.
    steps = " ".join(str(row["CreatedBy"]) for row in engine.client.images.get(result.reference).history())
    for package in ("gcc=", "libibverbs1=", "librdmacm1=", "libpython3.11-dev="):
        assert package in steps
