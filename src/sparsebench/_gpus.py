"""GPUs by the names that people type, and the GPUs that have no published rows yet.

    H200, h200 sxm, NVIDIA H200        NVIDIA H200
    H100, h100-80gb, h100-sxm5         NVIDIA H100 80GB HBM3
    RTX4090, rtx 4090, 4090            NVIDIA GeForce RTX 4090
    Hopper                             every GPU of the generation

A text names a device if the device has every word of it, or if the device's maker calls it so
(FORMS). H20 is not H200, and H100 PCIe is not the H100 with HBM3: their clocks and memories differ.
"""

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.resources import files

from sparsebench.errors import ResultError

GENERATIONS = {
    "Volta": ("V100", "Titan V"),
    "Turing": ("T4", "RTX 2070", "RTX 2080"),
    "Ampere": (
        *("A100", "A800", "A40", "A30", "A16", "A10", "A10G", "A2"),
        *("RTX A4000", "RTX A5000", "RTX A6000", "RTX 3060", "RTX 3070", "RTX 3080", "RTX 3090"),
    ),
    "Ada": (
        *("L40", "L40S", "L20", "L4", "RTX 4000 Ada", "RTX 5000 Ada", "RTX 6000 Ada"),
        *("RTX 4060", "RTX 4070", "RTX 4080", "RTX 4090"),
    ),
    "Hopper": ("H100", "H200", "H800", "H20", "GH200"),
    "Blackwell": (
        *("B100", "B200", "B300", "GB200", "GB300", "GB10", "RTX PRO 6000", "RTX PRO 5000"),
        *("RTX 5060", "RTX 5070", "RTX 5080", "RTX 5090"),
    ),
}
"""GPUs by generation, with the words by which their names differ."""

WANTED = ("A100", "L40S", "RTX 4090", "B200", "B300", "RTX 5090", "RTX PRO 6000", "GB10")
"""GPUs of which results are missed most; the kernels run from compute capability 8.0 on."""

FORMS = (
    ({"h100", "hbm3"}, {"sxm", "sxm5"}),
    ({"h200"}, {"sxm", "sxm5", "141gb", "hbm3e"}),
    ({"a100", "sxm4"}, {"sxm"}),
    ({"b200"}, {"sxm", "sxm6", "hbm3e"}),
)
"""Words of a device's name, and words that people use for the same board."""

OTHER_FORMS = {"nvl", "pcie"}
OTHER_MAKERS = re.compile(r"(amd|radeon|instinct|intel|gaudi|tpu|apple)\b|(mi|rx) ?\d{3,4}")
"""Names of processors that sparsebench cannot measure."""

LETTERS = str.maketrans("oil", "011")  # typed for the digits of a model


def names_device(name: str, device: str) -> bool:
    """Return whether `name` means a device: it has every word of it, in any case.

    A word may join several words of the device's name: RTX4090 is RTX 4090.
    """
    words = _words(device)
    spans = _spans(words) | {generation_of(device).lower()} - {""}
    for of_board, typed in FORMS:
        if of_board <= {*words} and OTHER_FORMS.isdisjoint(words):
            spans |= typed
    parts = {*_words(name)}
    return bool(parts) and parts <= spans


def generation_of(device: str) -> str:
    """Return the generation of a device, such as Hopper; "" if its name is not in GENERATIONS.

    4090 and RTX4090 are RTX 4090.
    """
    spans = {span.removeprefix("rtx") for span in _spans(_words(device))}
    for generation, models in GENERATIONS.items():
        if any("".join(_words(model)).removeprefix("rtx") in spans for model in models):
            return generation
    return ""


def gpus_with_advice() -> list[str]:
    """Return the models of the GPUs that `advise` has rows of, such as H200."""
    file = files("sparsebench.results") / "published" / "advice.json"
    if not file.is_file():
        return []
    devices = [gpu["name"] for gpu in json.loads(file.read_text("utf-8"))["gpus"]]
    models = [model for models in GENERATIONS.values() for model in models]
    return [model for model in models for device in devices if names_device(model, device)]


def unknown_gpu(text: str, published: Iterable[str]) -> str:
    """Say what a text may mean that names no published GPU: `; did you mean H100?`."""
    if generation_of(text):
        return "; no published run is on such a GPU, and `sparsebench new-gpu` measures one"
    if OTHER_MAKERS.match(text.lower()):
        return "; sparsebench measures NVIDIA GPUs and CPUs"
    plain = {"".join(_words(name)).translate(LETTERS): name for name in published}
    close = get_close_matches("".join(_words(text)).translate(LETTERS), plain, 1)
    return f"; did you mean {plain[close[0]]}?" if close else ""


def require_gpu(text: str, published: Iterable[str]) -> None:
    """Raise ResultError unless a text names a GPU or a generation, published or not."""
    if not text.strip():
        raise ResultError("--gpu: expected part of a GPU's name, such as H200; found ''")
    names = [*published]
    if not generation_of(text) and text.title() not in GENERATIONS:
        expected = f"expected a GPU such as {', '.join(dict.fromkeys([*names, *WANTED]))}"
        raise ResultError(f"--gpu: {expected}; found {text!r}{unknown_gpu(text, names)}")


def without_rows(devices: Iterable[str]) -> dict[str, list[str]]:
    """Return the WANTED GPUs that none of the devices is, by generation."""
    measured = [*devices]
    lacking: dict[str, list[str]] = {}
    for name in WANTED:
        if not any(names_device(name, device) for device in measured):
            lacking.setdefault(generation_of(name), []).append(name)
    return lacking


def _spans(words: list[str]) -> set[str]:
    """Return every run of words, joined: RTX 4090 is also RTX4090."""
    places = range(len(words) + 1)
    return {"".join(words[i:j]) for i in places for j in places if i < j}


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())
