"""GPUs by the names that people type."""

import pytest

from sparsebench._gpus import generation_of, names_device, unknown_gpu, without_rows

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("RTX4090", "NVIDIA GeForce RTX 4090", True),
        ("nvidia rtx-4090", "NVIDIA GeForce RTX 4090", True),
        ("4090", "NVIDIA GeForce RTX 4090", True),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("a100 sxm", "NVIDIA A100-SXM4-80GB", True),
        ("h200", H200, True),
        ("H200-SXM-141GB", H200, True),
        ("hopper", H200, True),
        ("H100 SXM", H100, True),
        ("h100-sxm5", H100, True),
        ("nvidia-h100-80gb-hbm3", H100, True),
        ("H20", H200, False),
        ("H100 PCIe", H100, False),
        ("H200 SXM", "NVIDIA H200 NVL", False),
        ("RTX 409", "NVIDIA GeForce RTX 4090", False),
        ("-", H200, False),
    ],
)
def test_a_device_answers_to_whole_words_of_its_name(name, device, expected) -> None:
    assert names_device(name, device) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("H10", "H100"),
        ("H1OO", "H100"),
        ("h20O", "H200"),
        ("A100", "new-gpu"),
        ("MI300X", "NVIDIA"),
        ("toaster", ""),
    ],
)
def test_a_name_without_rows_gets_the_nearest_one_or_a_way_to_measure(text, words) -> None:
    hint = unknown_gpu(text, ["H100", "H200"])
    assert words in hint
    assert bool(hint) == bool(words)


def test_a_generation_is_found_by_whole_words() -> None:
    assert generation_of("NVIDIA GeForce RTX 4090") == "Ada"
    assert generation_of("NVIDIA A100-SXM4-40GB") == "Ampere"
    assert generation_of("NVIDIA RTX PRO 6000 Blackwell Server Edition") == "Blackwell"
    assert {generation_of(name) for name in ("4090", "RTX4090", "rtx 4090")} == {"Ada"}
    assert {generation_of(name) for name in ("AMD EPYC", "H10", "cpu", "MI300")} == {""}


def test_a_measured_gpu_is_no_longer_wanted() -> None:
    before = {name for names in without_rows([H100, H200]).values() for name in names}
    after = {name for names in without_rows([H100, "NVIDIA L40S"]).values() for name in names}
    assert before - after == {"L40S"}
