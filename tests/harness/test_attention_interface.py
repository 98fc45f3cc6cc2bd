"""Transformers runs block-sparse attention: a tiny Llama generates the same tokens as with SDPA."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import sparsebench.nn  # noqa: E402, F401
from sparsebench.errors import Unsupported  # noqa: E402
from sparsebench.harness.models import attention  # noqa: E402

WINDOW = 20


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.3)
    return transformers.LlamaForCausalLM(config).eval()


def greedy(model, prompt: torch.Tensor, count: int, mask: torch.Tensor | None = None) -> list[int]:
    """Generate without a cache; `mask` is bool [tokens, tokens] for the longest sequence."""
    tokens = prompt
    for _ in range(count):
        n = tokens.shape[1]
        allowed = None if mask is None else mask[None, None, :n, :n]
        logits = model(tokens, attention_mask=allowed).logits[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens[0, prompt.shape[1] :].tolist()


@torch.no_grad()
def test_a_llama_with_a_window_generates_what_it_does_with_sdpa_and_the_same_mask(llama) -> None:
    prompt, count = torch.randint(0, 64, (1, 90)), 8
    place = torch.arange(prompt.shape[1] + count)
    behind = place[:, None] - place
    llama.set_attn_implementation("sdpa")
    full = greedy(llama, prompt, count)
    expected = greedy(llama, prompt, count, (behind >= 0) & (behind < WINDOW))
    llama.set_attn_implementation("sparsebench")
    llama.config.sparse_window = WINDOW
    tokens = llama.generate(prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)
    assert tokens[0, prompt.shape[1] :].tolist() == expected
    assert expected != full
    del llama.config.sparse_window
    assert greedy(llama, prompt, count) == full


@torch.no_grad()
def test_a_padded_batch_has_the_logits_of_sdpa(llama) -> None:
    tokens = torch.randint(0, 64, (2, 70))
    valid = torch.ones_like(tokens)
    valid[1, :9] = 0
    logits = []
    for name in ("sdpa", "sparsebench"):
        llama.set_attn_implementation(name)
        logits.append(llama(tokens, attention_mask=valid).logits)
    actual, expected = (one[valid.bool()] for one in reversed(logits))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"dropout": 0.1}, {"s_aux": torch.ones(1)}])
def test_what_changes_scores_is_refused(options: dict) -> None:
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(Unsupported, match=next(iter(options))):
        attention.attend(None, q, q, q, torch.ones(1, 1, 8, 8, dtype=torch.bool), **options)
