"""The host reads structs and parameters of kernels as a compiler does."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsebench.kernels._common.declarations import arguments_of, code_of, listed, record

MACROS = {"WORKERS": 160, "WARPGROUPS": 2, "BOXES": 9, "STRIPS": 12, "UNITS": 4}
TYPES = """
  #include <cstddef>
  using u16 = unsigned short; using u32 = unsigned; using u64 = unsigned long long;
  struct alignas(8) uint2 { u32 x, y; }; struct float4; struct TensorMap;
"""
STRUCTS = {
    **{"bsr_small": "Share Step Starts First Firsts", "bsr_strips": "Share Step Starts"},
    **{
        "bsr_wgmma": "Step Item First Scales",
        "bsr_fp32": "BlockRow",
        "bsr_resident": "Row Weights",
    },
    **{"bsr_wgrad": "Part Loads Sums", "bsr_wgrad_small": "Part Loads Sums Places Starts"},
    **{"bsr_wgrad_mma": "Part Loads Sums Slot Starts", "bitmap_mma": "Weights Activations"},
    **{"bitmap_pairs": "Weights"},
    **{"csr_cuda": "Start", "csr_cuda_wgrad": "Range Head", "twell_gate": "Out"},
    **{"spense_mma": "Activations Weights WorkItem"},
    **{"spense_wgmma": "Weights WorkTile Fixup WorkItem First Items Scales"},
    **{"attention_wgmma": "Tile Lists Parts Sizes", "attention_wgmma_dq": "Stats"},
    **{"attention_wgmma_backward": "Tile Lists Sizes Stats Stored"},
    **{"attention_wgmma_stored": "Tile Lists Sizes Stats"},
}


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_records_have_the_layout_of_a_compiler(tmp_path: Path) -> None:
    constants, parts = tuple(MACROS.items()), [TYPES]
    for name, structs in STRUCTS.items():
        code = code_of(name, constants)
        parts.append(f"namespace {name} {{")
        for struct in structs.split():
            kind = record(name, struct, constants)
            parts += re.findall(rf"struct (?:alignas\(\d+\) )?{struct} {{.*?}};", code)[:1]
            parts += [f"static_assert(sizeof({struct}) == {kind.itemsize});"]
            parts += [
                f"static_assert(offsetof({struct}, {field}) == {place[1]});"
                for field, place in (kind.fields or {}).items()
            ]
        parts.append("}")
    file = tmp_path / "structs.cpp"
    file.write_text("\n".join(parts))
    macros = [f"-D{name}={value}" for name, value in constants]
    command = ["g++", "-std=c++17", "-fsyntax-only", *macros, str(file)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[:3000]


def test_arguments_follow_the_branch_of_a_macro() -> None:
    maps, first, rest = [bytes(128)] * 3, [bytes(2560), bytes(640)], (0,) * 8
    listed_items = arguments_of("spense_wgmma", "multiply_tiles", (("SPLIT", 0), ("WORKERS", 160)))
    split = arguments_of("spense_wgmma", "multiply_tiles", (("SPLIT", 2), ("WORKERS", 160)))
    assert len(listed_items(*maps, *rest, *first, 0, 0, 1, 2, 3, 4, 5)[0]) == 7
    assert len(split(*maps, *rest, 6, 7, 0, 0, 1, 2)[0]) == 4


def test_records_on_a_device_have_the_bytes_of_records_on_the_host() -> None:
    kind = record("csr_cuda_wgrad", "Head")
    fields = {"first": [7, 2**31 - 1], "row": [3, 65535], "count": [8, 1]}
    expected = np.zeros(2, kind)
    for name, values in fields.items():
        expected[name] = values
    actual = listed(kind, **{name: torch.tensor(values) for name, values in fields.items()})
    assert actual.numpy().tobytes() == expected.tobytes()
