"""Sizes are read from configs of models; bad ones and bad input of `advise` are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparsebench.errors import ResultError
from sparsebench.reports import advice as presented
from sparsebench.results.advice.layer_estimates import BLOCKS, TWO_FOUR
from sparsebench.results.advice.measured_layers import packaged_evidence
from sparsebench.results.advice.pruning import KINDS, UNMEASURED, advise
from sparsebench.results.advice.step_model import BOUND, StepModel
from sparsebench.results.model_shapes import MODELS, Mixture, read_shapes
from tests.results.model_examples import LLAMA, config
from tests.tools.command_line import refusal

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({"intermediate_size": None}, "intermediate_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"head_dim": "wide"}, "head_dim"),
        ({"num_local_experts": 8}, "experts"),
        ({"model_type": "opt"}, "gated"),
        ({"model_type": "roberta"}, "gated"),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, "decoder-only"),
        ({"model_type": "t5", "hidden_size": None, "is_encoder_decoder": True}, "decoder-only"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, changes, token) -> None:
    with pytest.raises(ResultError, match=token):
        read_shapes(str(config(tmp_path, **changes)))


def test_a_mixture_reads_the_experts_that_its_tokens_hit(tmp_path: Path) -> None:
    evidence = packaged_evidence()
    model = read_shapes(str(config(tmp_path, **QWEN3_30B)))
    assert isinstance(model, Mixture)
    assert model.weights == pytest.approx(30.5e9, rel=0.01)
    assert [model.experts_hit(tokens) for tokens in (1, 16, 64, 4096)] == [8, 82, 126, 128]
    layer = StepModel(model, 16, 1024).mlp("2:4", 0.5)
    assert (layer.n, layer.k, layer.m) == (82 * 768, 2048, 2)
    one, few, many = (advise(evidence, model, "H200", tokens) for tokens in (1, 16, 64))
    for answer in (one, few, many):
        assert answer.word == UNMEASURED
        assert "no run of a model with experts is published" in answer.verdict
        assert {kind.step.basis for kind in answer.kinds} == {BOUND}
        assert {KINDS[kind.kind][0] for kind in answer.kinds} == {TWO_FOUR, BLOCKS}
    gains = [answer.kinds[0].step.value for answer in (one, few, many)]
    assert 1 < gains[0] < gains[1] < 16 / 9  # more experts are a larger part of the bytes
    (both, *_), dense = one.kinds, one.dense_gigabytes
    experts = 48 * 3 * 2048 * 768 * 128 * 2 / 1e9
    assert dense - both.gigabytes == pytest.approx(experts * 7 / 16)  # also those without a token
    assert "82 of 128 experts" in presented.about(few)[0]
    assert presented.commands(few) == {
        "published layers of experts": "sparsebench find 'experts 2:4'",
        "measure some": "sparsebench run experts",
    }
    qwen2 = QWEN3_30B | {"shared_expert_intermediate_size": 5632}
    assert read_shapes(str(config(tmp_path, **qwen2))).units == 128 * 768 + 5632


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({"num_experts_per_tok": None}, "num_experts_per_tok, a positive integer; found none"),
        ({"num_experts_per_tok": 129}, "expected at most 128 experts, found 129"),
        ({"model_type": "llama4_text"}, "found model_type llama4_text"),
        ({"kv_lora_rank": 512}, "found kv_lora_rank 512"),
        ({"shared_expert_intermediate_size": "wide"}, "shared_expert_intermediate_size"),
    ],
)
def test_a_mixture_that_does_not_fit_is_refused(tmp_path: Path, changes, token) -> None:
    with pytest.raises(ResultError, match=token):
        read_shapes(str(config(tmp_path, **QWEN3_30B | changes)))


@pytest.mark.parametrize("text", ["[]", "{", '{"text_config": 3}'])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ResultError, match="expected"):
        read_shapes(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "token"),
    [
        (["Lama-3-8B", "--gpu", "H200", "--batch", 1], "Llama-3-8B?"),
        (["Llama-3-8B", "--gpu", "NVIDIA", "--batch", 1], "--gpu"),
        (["Llama-3-8B", "--gpu", " ", "--batch", 1], "--gpu"),
        (["Llama-3-8B", "--gpu", "H200", "--batch", 0], "--batch"),
        (["Llama-3-8B", "--gpu", "H1OO", "--batch", 1], "did you mean H100?"),
        (["Llama-3-8B", "--gpu", "cpu", "--batch", 1], "expected a GPU such as H"),
        (["Llama-3-8B", "--gpu", "MI300", "--batch", 1], "RTX 4090"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[Any], token: str) -> None:
    assert token in refusal("advise", *arguments)


def test_a_model_has_the_name_of_its_file_or_of_the_folder_of_its_config_json(tmp_path) -> None:
    file = config(tmp_path)
    assert read_shapes(str(file)).name == tmp_path.name
    assert read_shapes(str(file.rename(tmp_path / "mine.json"))).name == "mine"


def test_a_model_that_reads_images_may_leave_out_what_its_family_has(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **sizes}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    listed, shapes = read_shapes("Gemma-3-4b"), read_shapes(str(tmp_path))
    assert (shapes.mlp, shapes.weights) == (listed.mlp, listed.weights)


def test_a_model_that_reads_images_has_its_sizes_in_text_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    shapes = read_shapes(str(tmp_path))
    assert (shapes.mlp, shapes.weights) == (MODELS[0].mlp, MODELS[0].weights)
