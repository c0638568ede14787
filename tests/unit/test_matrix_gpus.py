"""GPU models are found by the names that drivers, clouds and people use."""

from __future__ import annotations

import pytest

from envforge.matrix.gpus import find_gpu, names_of, nearest_gpus, squash
from envforge.matrix.load import load_matrix

MATRIX = load_matrix(use_cache=False)


@pytest.mark.parametrize(
    ("name", "model", "sm"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", "8.0"),
        ("NVIDIA A100-PCIE-40GB", "A100", "8.0"),
        ("NVIDIA A100 80GB PCIe", "A100", "8.0"),
        ("NVIDIA A100-SXM-64GB", "A100", "8.0"),
        ("NVIDIA A100-PG509-200", "A100", "8.0"),
        ("A100-SXM4-40GB", "A100", "8.0"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "A100", "8.0"),
        ("GRID A100-10C", "A100", "8.0"),
        ("NVIDIA A10", "A10", "8.6"),
        ("NVIDIA A10-24Q", "A10", "8.6"),
        ("NVIDIA A10G", "A10G", "8.6"),
        ("NVIDIA A16", "A16", "8.6"),
        ("NVIDIA A2", "A2", "8.6"),
        ("NVIDIA A30", "A30", "8.0"),
        ("NVIDIA A40", "A40", "8.6"),
        ("Tesla V100-SXM2-32GB", "Tesla V100", "7.0"),
        ("Tesla V100-SXM3-32GB-H", "Tesla V100", "7.0"),
        ("Tesla V100-PCIE-16GB", "Tesla V100", "7.0"),
        ("Tesla V100S-PCIE-32GB", "Tesla V100", "7.0"),
        ("Tesla V100-DGXS-32GB", "Tesla V100", "7.0"),
        ("NVIDIA V100", "Tesla V100", "7.0"),
        ("Tesla T4", "Tesla T4", "7.5"),
        ("NVIDIA T4", "Tesla T4", "7.5"),
        ("Tesla K80", "Tesla K80", "3.7"),
        ("k40m", "Tesla K40", "3.5"),
        ("Tesla M60", "Tesla M60", "5.2"),
        ("NVIDIA GeForce GTX 980 Ti", "GeForce GTX 980 Ti", "5.2"),
        ("GTX 970", "GeForce GTX 970", "5.2"),
        ("GeForce GTX TITAN X", "GeForce GTX TITAN X", "5.2"),
        ("NVIDIA TITAN X (Pascal)", "TITAN X (Pascal)", "6.1"),
        ("Tesla P100-PCIE-16GB", "Tesla P100", "6.0"),
        ("Tesla P40", "Tesla P40", "6.1"),
        ("Tesla P4", "Tesla P4", "6.1"),
        ("NVIDIA H100 80GB HBM3", "H100", "9.0"),
        ("NVIDIA H100 PCIe", "H100", "9.0"),
        ("NVIDIA H100 NVL", "H100", "9.0"),
        ("h100", "H100", "9.0"),
        ("NVIDIA H200", "H200", "9.0"),
        ("NVIDIA H20", "H20", "9.0"),
        ("NVIDIA H20-3e", "H20", "9.0"),
        ("NVIDIA GH200 480GB", "GH200", "9.0"),
        ("NVIDIA GH200 144G HBM3e", "GH200", "9.0"),
        ("NVIDIA B200", "B200", "10.0"),
        ("NVIDIA GB200", "GB200", "10.0"),
        ("NVIDIA B300 SXM6 AC", "B300", "10.3"),
        ("NVIDIA B300 SXM6 QX", None, None),  # a suffix nobody has seen yet is not guessed away
        ("NVIDIA GB10", "GB10 (DGX Spark)", "12.1"),
        ("NVIDIA L4", "L4", "8.9"),
        ("NVIDIA L40", "L40", "8.9"),
        ("NVIDIA L40S", "L40S", "8.9"),
        ("NVIDIA L20", "L20", "8.9"),
        ("NVIDIA GeForce GTX 1080 Ti", "GeForce GTX 1080 Ti", "6.1"),
        ("GeForce GTX 1080", "GeForce GTX 1080", "6.1"),
        ("NVIDIA GeForce GTX 1650", "GeForce GTX 1650", "7.5"),
        ("GeForce RTX 2080 Ti", "GeForce RTX 2080 Ti", "7.5"),
        ("GeForce RTX 2080 with Max-Q Design", "GeForce RTX 2080", "7.5"),
        ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090", "8.6"),
        ("NVIDIA GeForce RTX 3090 Ti", "GeForce RTX 3090 Ti", "8.6"),
        ("3090", "GeForce RTX 3090", "8.6"),
        ("2080 Ti", "GeForce RTX 2080 Ti", "7.5"),
        ("4000", None, None),  # of a Quadro, an RTX Ada, an RTX PRO
        ("NVIDIA GeForce RTX 4060", "GeForce RTX 4060", "8.9"),
        ("NVIDIA GeForce RTX 4060 Ti", "GeForce RTX 4060 Ti", "8.9"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "GeForce RTX 4070 Ti SUPER", "8.9"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090", "8.9"),
        ("rtx4090", "GeForce RTX 4090", "8.9"),
        ("RTX-4090", "GeForce RTX 4090", "8.9"),
        ("NVIDIA GeForce RTX 5090", "GeForce RTX 5090", "12.0"),
        ("Quadro RTX 8000", "Quadro RTX 8000", "7.5"),
        ("Quadro RTX 6000", "Quadro RTX 6000", "7.5"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", "8.9"),
        ("NVIDIA RTX A6000", "RTX A6000", "8.6"),
        ("A6000", "RTX A6000", "8.6"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server Edition", "12.0"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Workstation Edition", "12.0"),
        ("NVIDIA TITAN RTX", "Titan RTX", "7.5"),
        ("NVIDIA TITAN V", "Titan V", "7.0"),
        ("NVIDIA Graphics Device", None, None),
        ("Tesla M6", None, None),
        ("RTX 4060 Turbo", None, None),
        ("NVIDIA", None, None),
        ("", None, None),
    ],
)
def test_name_lookup(name: str, model: str | None, sm: str | None) -> None:
    gpu = find_gpu(MATRIX, name)
    assert (gpu and gpu.name, gpu and gpu.sm) == (model, sm)


def test_every_model_finds_itself_and_only_itself() -> None:
    for gpu in MATRIX.gpus:
        for name in (gpu.name, f"NVIDIA {gpu.name}", gpu.name.upper(), *gpu.aliases):
            assert find_gpu(MATRIX, name) is gpu, name
    keys = [key for gpu in MATRIX.gpus for key in names_of(gpu)]
    assert len(keys) == len(set(keys))
    assert "" not in keys


def test_an_unknown_name_gets_near_ones() -> None:
    assert "GeForce RTX 4090" in nearest_gpus(MATRIX, "NVIDIA GeForce RTX 4091")
    assert "A100" in nearest_gpus(MATRIX, "A101")
    assert nearest_gpus(MATRIX, "completely different") == ()


def test_squash_keeps_what_makes_another_chip() -> None:
    assert squash("RTX 4060 Ti") != squash("RTX 4060")
    assert squash("L40S") != squash("L40")
    assert squash("A10G") != squash("A10")
    assert squash("RTX 6000 Ada Generation") != squash("Quadro RTX 6000")
