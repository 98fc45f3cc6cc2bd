"""Transformers runs block-sparse attention: a tiny Llama generates the same tokens as with SDPA."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")

import sparsebench.nn  # noqa: E402, F401
from sparsebench.errors import Unsupported  # noqa: E402
from sparsebench.formats.block_mask import BlockMask  # noqa: E402
from sparsebench.harness.models import attention, static_cache  # noqa: E402
from sparsebench.kernels.nn.attention import select_attention  # noqa: E402

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


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_a_prompt_selects_its_blocks_and_decoding_attends_to_all_keys(llama, cache, monkeypatch):
    calls, select = [], attention.select_attention
    monkeypatch.setattr(
        attention, "select_attention", lambda *a, **k: calls.append(k) or select(*a, **k)
    )
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    options |= {"cache_implementation": cache}
    prompt, tokens = torch.randint(1, 64, (2, 90)), []
    for name, chosen, selections in (
        ("sdpa", None, 0),
        ("sparsebench", {"keep": 12, "block": 8}, 0),  # all of them: no selection
        ("sparsebench", {"mass": 1, "block": 8}, 4),  # selects all of them
        ("sparsebench", {"keep": 6, "block": 8, "first": 2}, 8),
    ):
        llama.set_attn_implementation(name)
        llama.config.sparse_select = chosen
        tokens.append(llama.generate(prompt, **options)[:, 90:].tolist())
        logits = llama(prompt).logits
        assert len(calls) == selections
    assert tokens[0] == tokens[1] == tokens[2]
    assert calls[4] | {"scale": 0} == {
        "causal": True,
        "scale": 0,
        "method": "pooled",
        "keep": 6,
        "mass": None,
        "block": 8,
        "first": 2,
        "last": 1,
    }
    whole = torch.cat((prompt, torch.randint(1, 64, (2, 6))), 1)
    torch.testing.assert_close(llama(whole).logits[:, :88], logits[:, :88], atol=1e-4, rtol=1e-4)
    padding = torch.ones(2, 90, dtype=torch.long)
    padding[1, :9] = 0
    with pytest.raises(Unsupported, match="expected whole causal prompts without padding"):
        llama(prompt, attention_mask=padding)
    for wrong, expected in (
        ({"keep": 4, "method": 8}, "expected sparse_select such as"),
        ({"keep": 4, "blok": 8}, "did you mean block"),
        ({"keep": 4, "method": "xatention"}, "did you mean xattention"),
        ({"keep": 4, "method": "xattention", "strid": 8}, "did you mean stride"),
        ({"keep": 4, "stride": 8}, "with pooled, found 'stride'"),
        ({"keep": 4, "method": "os.path"}, "expected a method, found 'os.path'"),
    ):
        llama.config.sparse_select = wrong
        with pytest.raises(Unsupported, match=expected):
            llama(prompt)
    del llama.config.sparse_select


NOT_SELECTIONS = [
    *({"block": 8}, {"keep": 4, "block": None}, {"keep": 4, "block": 0}),
    *({"keep": 1.5}, {"keep": True, "last": 0}, {"keep": 0, "mass": 0.5}, {"keep": 2, "first": 2}),
    *({"mass": 1.1}, {"mass": 0}, {"mass": math.nan}, {"keep": math.nan}, {"keep": "4"}, 16),
]


@pytest.mark.parametrize("wrong", NOT_SELECTIONS, ids=str)
@torch.no_grad()
def test_what_selects_nothing_is_refused_whatever_the_length(llama, wrong) -> None:
    llama.set_attn_implementation("sparsebench")
    llama.config.sparse_select = wrong
    for prompt in (torch.ones(1, 90, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)):
        with pytest.raises(Unsupported, match="expected sparse_select such as"):
            llama(prompt)
    del llama.config.sparse_select


@torch.no_grad()
def test_a_compiled_prompt_selects_what_it_does_uncompiled(llama) -> None:
    llama.set_attn_implementation("sparsebench")
    llama.config.sparse_select = {"keep": 4, "block": 16}
    torch._dynamo.reset()
    compiled = torch.compile(llama, fullgraph=True, backend="aot_eager")
    for length in (90, 91, 40, 64):  # from the second on, it is symbolic
        prompt = torch.randint(1, 64, (2, length))
        torch.testing.assert_close(compiled(prompt).logits, llama(prompt).logits)
    del llama.config.sparse_select


@torch.no_grad()
def test_a_model_that_is_not_causal_selects_nothing() -> None:
    model = transformers.BertModel(transformers.BertConfig(**TWO, vocab_size=64)).eval()
    model.set_attn_implementation("sparsebench")
    model.config.sparse_select = {"keep": 2, "block": 16}
    with pytest.raises(Unsupported, match="expected whole causal prompts"):
        model(torch.ones(1, 90, dtype=torch.long))


@pytest.mark.parametrize("options", [{"mass": 1.0}, {"keep": 16, "mass": 1.0}, {"keep": 16}])
@torch.no_grad()
def test_prompts_of_fewer_blocks_than_are_kept_attend_to_all(llama, options: dict) -> None:
    prompt = torch.randint(1, 64, (1, 100))
    for length in (1, 8, 9, 16, 17, 100):
        logits = []
        for name, selection in (("sdpa", None), ("sparsebench", {"block": 8, **options})):
            llama.set_attn_implementation(name)
            llama.config.sparse_select = selection
            logits.append(llama(prompt[:, :length]).logits)
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    del llama.config.sparse_select


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        (
            {"method": "xattention", "mass": 0.7, "block": 16, "stride": 8},
            {"method": "xattention", "mass": 0.7, "block": 16, "stride": 8},
        ),
        ({"method": "xattention", "mass": 0.5}, {"method": "xattention", "mass": 0.5, "block": 64}),
        (
            {"method": "moba", "keep": 2, "block": 16},
            {"method": "moba", "keep": 2, "block": 16, "first": 0, "last": 1},
        ),
    ],
)
@torch.no_grad()
def test_a_prompt_selects_by_a_method_as_a_call_by_hand_does(llama, options, by_hand) -> None:
    prompt = torch.randint(1, 64, (2, 150))

    def select(module, query, key, value, attention_mask, scaling=None, **_):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return select_attention(q, k, v, causal=True, scale=scaling, **by_hand), None

    transformers.AttentionInterface.register("by_hand", select)
    transformers.AttentionMaskInterface.register("by_hand", attention.mask_of)
    llama.config.sparse_select = options
    try:
        logits = {}
        for name in ("by_hand", "sparsebench", "sdpa"):
            llama.set_attn_implementation(name)
            logits[name] = llama(prompt, use_cache=False).logits
    finally:
        del llama.config.sparse_select
    assert torch.equal(logits["sparsebench"].argmax(-1), logits["by_hand"].argmax(-1))
    torch.testing.assert_close(logits["sparsebench"], logits["by_hand"])
    assert not torch.allclose(logits["sparsebench"], logits["sdpa"], atol=1e-3)


def decode(model, cache, prompt: torch.Tensor, tokens: torch.Tensor, call) -> torch.Tensor:
    """Return the logits of each of `tokens`, which follow a prompt, one call for each."""
    model(prompt, past_key_values=cache)
    steps = [call(t.clone(), past_key_values=cache).logits.clone() for t in tokens.split(1, 1)]
    return torch.cat(steps, 1)


@pytest.mark.parametrize(("compiled", "batch"), [(False, 1), (True, 2)])
@torch.no_grad()
def test_decoding_selects_pages_of_a_static_cache(llama, compiled, batch) -> None:
    prompt, tokens = torch.randint(1, 64, (batch, 83)), torch.randint(1, 64, (batch, 20))
    whole = torch.cat((prompt, tokens), 1)
    llama.set_attn_implementation("sparsebench")
    expected = llama(whole, use_cache=False).logits[:, prompt.shape[1] :]
    torch._dynamo.reset()
    call = torch.compile(llama, fullgraph=True, backend="aot_eager") if compiled else llama
    results = {}
    try:
        for keep, length in ((4, 128), (8, 128), (4, 127)):
            llama.config.sparse_select = {"keep": keep, "block": 16}
            cache = transformers.StaticCache(llama.config, max_cache_len=length)
            for _ in range(2):  # the second time after other tokens
                results[keep, length] = decode(llama, cache, prompt, tokens, call)
                cache.reset()
                decode(llama, cache, prompt.flip(1), tokens[:, :3], llama)
                cache.reset()
    finally:
        del llama.config.sparse_select
    torch.testing.assert_close(results[8, 128], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(results[4, 128], results[4, 127], atol=1e-3)  # without pages


@torch.no_grad()
def test_pages_follow_the_keys_of_their_cache(llama) -> None:
    keys = torch.randn(2, 2, 96, 8)
    static_cache.make_pages(keys, 64)
    pages = static_cache.pages_of(keys)
    assert pages.table.shape == (4, 3)  # pages of 32 keys
    lengths = torch.tensor([70, 33], dtype=torch.int32)
    static_cache.append(pages, keys, lengths, 70)
    for n, length in enumerate(lengths.tolist()):
        for page, of_page in enumerate(keys[n, :, :length].split(32, 1)):
            bounds = pages.bounds.view(2, 2, 3, 2, 8)[n, :, page]
            assert torch.equal(bounds, torch.stack([of_page.amin(1), of_page.amax(1)], 1))
    q, allowed = torch.randn(2, 4, 1, 8), torch.arange(96) < lengths[:, None]
    allowed[1, 3] = False
    selection = {"keep": 2, "block": 32, "first": 1, "last": 1}
    o = static_cache.decode(pages, q, keys, keys, allowed, selection, None)
    assert o.shape == (2, 1, 4, 8)
    assert not o[0].isnan().any()
    assert o[1].isnan().all()
    for odd in (torch.randn(1, 2, 94, 8), torch.randn(1, 96, 2, 8).transpose(1, 2)):
        static_cache.make_pages(odd, 64)
        assert static_cache.pages_of(odd) is None


@torch.no_grad()
def test_layers_with_a_window_keep_it_beside_layers_that_select() -> None:
    torch.manual_seed(0)
    sizes = {**TWO, "vocab_size": 64, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 20}
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3TextConfig(**sizes, **kinds, initializer_range=0.3)
    model, prompt = transformers.Gemma3ForCausalLM(config).eval(), torch.randint(1, 64, (1, 90))
    logits = {}
    for name, options in (
        ("sdpa", None),
        ("sparsebench", {"mass": 1, "block": 16}),  # all blocks
        ("few", {"keep": 2, "block": 16}),
    ):
        model.set_attn_implementation("sdpa" if name == "sdpa" else "sparsebench")
        model.config.sparse_select = options
        logits[name] = model(prompt, use_cache=False).logits
    torch.testing.assert_close(logits["sparsebench"], logits["sdpa"], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits["few"], logits["sdpa"], atol=1e-2)


TWO = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 32}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_share_the_mask_of_a_forward_pass(llama, mode, compiled, monkeypatch) -> None:
    made, elements = [], BlockMask.from_elements
    monkeypatch.setattr(BlockMask, "from_elements", lambda *a: made.append(a) or elements(*a))
    llama.set_attn_implementation("sparsebench")
    torch._dynamo.reset()
    model = torch.compile(llama, fullgraph=True, backend="aot_eager") if compiled else llama
    with mode():
        for _ in range(2):
            model(torch.arange(20).view(2, 10), use_cache=False)
    assert len(made) == 2


def test_a_mask_that_is_written_is_listed_again() -> None:
    q, mask = torch.randn(1, 2, 8, 4), torch.ones(1, 1, 8, 8, dtype=torch.bool)
    before, _ = attention.attend(None, q, q, q, mask)
    mask[..., 4:] = False
    after, _ = attention.attend(None, q, q, q, mask)
    assert not torch.equal(after, before)
    assert torch.equal(after, attention.attend(None, q, q, q, mask.clone())[0])


def test_a_mask_to_add_is_one_of_bool() -> None:
    q, allowed = torch.randn(1, 2, 8, 4), torch.ones(8, 8).tril().bool()[None, None]
    expected, _ = attention.attend(None, q, q, q, allowed)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for hidden in (-1e4, torch.finfo(dtype).min, -torch.inf):
            mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, hidden)
            assert torch.equal(attention.attend(None, q, q, q, mask)[0], expected)
    bias = torch.zeros(1, 1, 8, 8).masked_fill(~allowed, -3.0)
    with pytest.raises(Unsupported, match="found a bias"):
        attention.attend(None, q, q, q, bias)


def vision() -> dict:
    return {"image_size": 32, "patch_size": 8, **TWO}


@pytest.mark.parametrize("implementation", ["eager", "compiled"])
@torch.no_grad()
def test_encoders_without_a_mask_attend_to_everything(implementation) -> None:
    audio = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64}
    audio |= {"max_source_positions": 50, "num_mel_bins": 16, "pad_token_id": 0}
    text = {**TWO, "vocab_size": 64}
    clip = transformers.CLIPConfig(text_config=text, vision_config=vision())
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    ids, picture = torch.arange(10)[None] + 3, torch.randn(1, 3, 32, 32)
    models = {
        transformers.CLIPModel(clip): {"input_ids": ids, "pixel_values": picture},
        transformers.ViTModel(transformers.ViTConfig(**vision())): {"pixel_values": picture},
        transformers.WhisperModel(transformers.WhisperConfig(**audio, **heads)): {
            "input_features": torch.randn(1, 16, 100),
            "decoder_input_ids": ids,
        },
    }
    for model, inputs in models.items():
        torch._dynamo.reset()
        model.eval().set_attn_implementation("sdpa")
        expected = next(iter(model(**inputs).values()))
        model.set_attn_implementation("sparsebench")
        call = model
        if implementation == "compiled":
            call = torch.compile(model, fullgraph=True, backend="aot_eager")
        actual = next(iter(call(**inputs).values()))
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_no_mask_is_the_causal_rule_where_sdpa_takes_it() -> None:
    q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 12, 4)
    rule = torch.ones(8, 12).tril().bool()[None, None]
    for module, mask in ((None, rule), (torch.nn.Module(), rule)):
        actual, _ = attention.attend(module, q, k, k, None)
        assert torch.equal(actual, attention.attend(module, q, k, k, mask)[0])
    whole, _ = attention.attend(None, q, k, k, None, is_causal=False)
    assert torch.equal(whole, attention.attend(None, q, k, k, torch.ones_like(rule))[0])
    one, _ = attention.attend(None, q[:, :, :1], k, k, None)
    torch.testing.assert_close(
        one, attention.attend(None, q[:, :, :1], k, k, rule[:, :, :1] | True)[0]
    )


@pytest.mark.filterwarnings("ignore")
def test_models_that_would_ignore_it_are_refused() -> None:
    bloom = {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    with pytest.raises(Unsupported, match="BloomForCausalLM, which computes attention itself"):
        transformers.BloomForCausalLM._from_config(
            transformers.BloomConfig(**bloom), attn_implementation="sparsebench"
        )
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**bloom))
    with pytest.raises(Unsupported, match="BloomForCausalLM"):
        model.set_attn_implementation("sparsebench")
    assert model.config._attn_implementation != "sparsebench"
    clip = transformers.CLIPVisionConfig(**vision(), sparse_window=8)
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "window_size": 4}
    swin = transformers.SwinConfig(**sizes, depths=[1], num_heads=[2], sparse_window=8)
    for model in (transformers.CLIPVisionModel(clip), transformers.SwinModel(swin)):
        model.eval().set_attn_implementation("sparsebench")
        with pytest.raises(Unsupported, match="expected a mask for sparse_window"):
            model(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"dropout": 0.1}, {"s_aux": torch.ones(1)}])
def test_what_changes_scores_is_refused(options: dict) -> None:
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(Unsupported, match=next(iter(options))):
        attention.attend(None, q, q, q, torch.ones(1, 1, 8, 8, dtype=torch.bool), **options)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, of its first graph
@torch.no_grad()
def test_a_graph_of_a_step_selects_other_pages_in_each_replay() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).cuda().eval()
    prompt = torch.randint(1, 64, (2, 200), device="cuda")
    tokens = torch.randint(1, 64, (2, 40), device="cuda")
    model.set_attn_implementation("sparsebench")
    expected = model(torch.cat((prompt, tokens), 1), use_cache=False).logits[:, 200:]
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    results = []
    for keep, call in ((4, model), (4, step), (16, step)):
        model.config.sparse_select = {"keep": keep, "block": 16}
        cache = transformers.StaticCache(model.config, max_cache_len=256)

        results.append(decode(model, cache, prompt, tokens, call))
    torch.testing.assert_close(results[1], results[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(results[2], expected, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(results[1], expected, atol=1e-2)
