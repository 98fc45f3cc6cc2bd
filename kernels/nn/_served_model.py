"""A model of Qwen3's shape whose MLPs store their weights in any format (serving_transformers.py).

    projections, embedding, head    dense, layers of transformers
    MLPs of dense weights           likewise
    MLPs in 2:4                     SpenseGatedMLP, also beside a dense part
    MLPs in blocks                  BlockSparseGatedMLP, frozen
    norms                           nn.RMSNorm, a launch; those of transformers are eight, and
                                    took a quarter of a dense step (NOTES.md)

All layers have a copy of the weights of one.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.operator import bucket
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.bsr.experts_ffn_triton import gate_above_up
from sparsebench.kernels.dense._decoder import EPSILON, ROTARY, copy_of
from sparsebench.kernels.nn._bsr_pattern import share_plans
from sparsebench.kernels.nn.block_sparse_mlp import BlockSparseGatedMLP, layer_of
from sparsebench.kernels.nn.spense import SpenseGatedMLP
from sparsebench.kernels.spense.spense_ffn import joined


def model_of(operands: Operands) -> Any:
    """Return Qwen3ForCausalLM, whose layers all have a copy of the weights. Raises Unsupported."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    w, problem, device = operands.weights, operands.problem, operands.device
    config = Qwen3Config(
        vocab_size=problem["vocab"],
        hidden_size=problem["hidden"],
        intermediate_size=problem["intermediate"],
        num_hidden_layers=problem["layers"],
        num_attention_heads=problem["heads"],
        num_key_value_heads=problem["kv_heads"],
        head_dim=problem["head_dim"],
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype=w["wqkv"].to_dense().dtype,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    width, of_cache = (problem[name] * problem["head_dim"] for name in ("heads", "kv_heads"))
    q, k, v = w["wqkv"].to_dense().split((width, of_cache, of_cache))
    each_mlp = mlps(operands)
    for layer in model.model.layers:
        attention = layer.self_attn
        projections = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": w["wo"].to_dense()}
        for name, weight in projections.items():
            set_weight(getattr(attention, name), weight.clone())
        layer.mlp = each_mlp(layer.mlp)
    set_weight(model.model.embed_tokens, w["we"].to_dense())
    set_weight(model.lm_head, w["wh"].to_dense())
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    for name, parameter in [*model.named_parameters()]:
        if parameter.is_meta:  # the gain of a norm
            norm = nn.RMSNorm(parameter.shape, EPSILON, device=device, dtype=q.dtype)
            model.set_submodule(name.rpartition(".")[0], norm.requires_grad_(False))
    model.eval()  # type: ignore[no-untyped-call]
    return model


def set_weight(module: nn.Module, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight, requires_grad=False)


def mlps(operands: Operands) -> Callable[[Any], nn.Module]:
    """Return what makes the MLP of a layer, given a dense one without weights."""
    wg, wu, wd = (operands.weights[name] for name in ("wg", "wu", "wd"))
    if isinstance(wg, Spense) and isinstance(wu, Spense) and isinstance(wd, Spense):
        of_2_4 = joined(wg, wu)
        return lambda _: SpenseGatedMLP.from_spense(copy_of(of_2_4), copy_of(wd))
    if isinstance(wg, Bsr) and isinstance(wu, Bsr) and isinstance(wd, Bsr):
        of_blocks = gate_above_up(wg, wu)
        first = layer_of(of_blocks), layer_of(wd)

        def blocks(_: Any) -> nn.Module:
            """Copy the weights and share the plans, which took 15 s for 12 layers."""
            each = layer_of(of_blocks), layer_of(wd)
            for layer, planned in zip(each, first, strict=True):
                share_plans((layer.offsets, layer.columns), (planned.offsets, planned.columns))
            return BlockSparseGatedMLP(*each).freeze()

        return blocks
    if not isinstance(wg, Dense):
        raise Unsupported(f"expected weights in dense, spense or bsr, found {type(wg).__name__}")

    def dense(mlp: Any) -> nn.Module:
        for name, weight in {"gate_proj": wg, "up_proj": wu, "down_proj": wd}.items():
            set_weight(getattr(mlp, name), weight.to_dense().clone())
        return mlp  # type: ignore[no-any-return]

    return dense


def plan(model: Any, tokens: Iterable[int]) -> None:
    """Plan the MLPs for these numbers of tokens, without a search, and call each.

    A layer's first calls load its kernels and pack its blocks, which would cost the first request.
    Blocks keep two packed copies, so the last calls are those for a whole chunk of prompts and for
    the fewest tokens: to pack 12 layers took 23 ms. Calls cannot be recorded here, because a
    recording holds for one stream (front.hpp).
    """
    buckets = sorted({bucket(m) for m in tokens})
    x = model.lm_head.weight.new_zeros(buckets[-1], model.config.hidden_size)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "plan"):
            layer.mlp.plan(buckets, search=False)
        with torch.no_grad():
            for m in (*buckets, buckets[-1], buckets[0]):
                layer.mlp(x[:m])
