"""`convert` and `sparsify_` for every kind of task, and for names that transformers maps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.pruning.convert import convert
from sparsebench.harness.models.pruning.left_dense import HEADS
from sparsebench.kernels.nn import BlockSparseLinear
from sparsebench.nn import BlockSparse, sparsify_
from tests.harness.tiny_models import transformers

BODY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
TEXT = BODY | {"vocab_size": 256, "num_labels": 16, "pad_token_id": 0}
GROUPED = TEXT | {"num_key_value_heads": 2}
IMAGE = BODY | {"image_size": 32, "patch_size": 8}
SPEECH = BODY | {
    "vocab_size": 32,
    "conv_dim": (32, 32),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
PAIR = {
    f"{part}_{size}": value
    for part in ("encoder", "decoder")
    for size, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 128))
}
TOKENS = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WHISPER = PAIR | TOKENS | {"d_model": 64, "max_source_positions": 50, "num_mel_bins": 16}
BART = PAIR | TOKENS | {"d_model": 64}
T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4}


def llava() -> Any:
    text, vision = transformers.LlamaConfig(**GROUPED), transformers.CLIPVisionConfig(**IMAGE)
    return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=250)


def gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**GROUPED, head_dim=16).to_dict()
    return transformers.Gemma3Config(text_config=text, vision_config=IMAGE, mm_tokens_per_image=4)


def qwen3_vl_moe() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = GROUPED | EXPERTS | {"head_dim": 16, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}
    vision |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)


def clip() -> Any:
    return transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE)


TASKS: list[tuple[str, Any, set[str]]] = [
    ("LlamaForCausalLM", GROUPED, {"lm_head"}),
    ("LlamaForSequenceClassification", GROUPED, {"score"}),
    ("LlamaForTokenClassification", GROUPED, {"score"}),
    ("LlamaForQuestionAnswering", GROUPED, {"qa_outputs"}),
    ("BertForMaskedLM", TEXT, {"cls.predictions.transform.dense", "cls.predictions.decoder"}),
    ("BertForSequenceClassification", TEXT, {"classifier"}),
    ("BertForMultipleChoice", TEXT, {"classifier"}),
    ("BertForQuestionAnswering", TEXT, {"qa_outputs"}),
    ("RobertaForSequenceClassification", TEXT, {"classifier.dense", "classifier.out_proj"}),
    ("BartForConditionalGeneration", BART, {"lm_head"}),
    ("T5ForQuestionAnswering", T5, {"qa_outputs"}),
    ("T5ForConditionalGeneration", T5, {"lm_head"}),
    ("WhisperForConditionalGeneration", WHISPER, {"proj_out"}),
    ("WhisperForAudioClassification", WHISPER, {"classifier"}),
    ("Wav2Vec2ForCTC", SPEECH, {"lm_head"}),
    ("Wav2Vec2ForSequenceClassification", SPEECH, {"projector", "classifier"}),
    ("ViTForImageClassification", IMAGE | {"num_labels": 16}, {"classifier"}),
    ("VideoMAEForVideoClassification", IMAGE | {"num_frames": 4}, {"classifier"}),
    ("CLIPForImageClassification", clip, {"classifier"}),
    ("LlavaForConditionalGeneration", llava, {"lm_head"}),
    ("Gemma3ForConditionalGeneration", gemma3, {"lm_head"}),
    ("Qwen3MoeForCausalLM", GROUPED | EXPERTS, {"lm_head"}),
    ("Qwen3VLMoeForConditionalGeneration", qwen3_vl_moe, {"lm_head"}),
]


def built(name: str, config: dict[str, Any] | Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    with models.quiet(transformers):
        fields = config() if callable(config) else kind.config_class(**config)
        return kind(fields).bfloat16().eval()


def linear_names(model: nn.Module, kind: type[nn.Module]) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is kind}


@pytest.mark.parametrize(("name", "config", "heads"), TASKS, ids=[task[0] for task in TASKS])
@pytest.mark.filterwarnings("ignore:sparsify_ replaces")
def test_every_task_is_converted_with_a_dense_head(name, config, heads, tmp_path):
    model = built(name, config)
    with models.quiet(transformers):
        model.save_pretrained(tmp_path / "old")
    state = load_file(tmp_path / "old/model.safetensors")
    for weight in state.values():
        if weight.dim() == 2 and not weight.shape[1] % 8:
            weight.view(-1, 4)[:, :2] = 0
    save_file(state, tmp_path / "old/model.safetensors", {"format": "pt"})
    written = convert(tmp_path / "old", tmp_path / "new")
    with models.quiet(transformers):
        expected = type(model).from_pretrained(tmp_path / "old").state_dict()
        restored = type(model).from_pretrained(tmp_path / "new")
        dense = linear_names(restored, nn.Linear)
        actual = restored.dequantize().state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(tensor, actual[key]) for key, tensor in expected.items())
    assert heads <= dense
    assert written.dense[HEADS].tensors == len(heads)
    assert any("MoE" in reason or "Moe" in reason for reason in written.dense) == ("Moe" in name)
    sparsify_(model, BlockSparse(16, 0.5))
    assert heads <= linear_names(model, nn.Linear)
    assert linear_names(model, BlockSparseLinear)
