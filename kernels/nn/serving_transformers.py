"""A server: transformers' continuous batching over a model of Qwen3's shape.

    Qwen3ForCausalLM             its MLPs are dense, in 2:4 or in blocks (_served_model.py)
    ContinuousBatchingManager    a thread that makes one step after the other

A call reads the prompts, adds `concurrency` requests, adds one when one ends, and waits for the
last. Each layer has a copy of the weights. Layers are planned for all numbers of tokens that a step
can have, without a search, as `sparsify_` and `from_pretrained` do.

Attention is that of flash_attn_3 if its package is installed, else sdpa: transformers then gathers
keys and values of all requests, repeats them for each head, and masks those of other requests.

A step's tokens are padded to a multiple of `rows`, and what it reads of the cache to one of
`reads`: each pair of these is a CUDA graph, captured when it is met first.

The token that follows is fixed (harness/ops/serving.py): a hook behind the model stores the logits
of a request's last step, and then puts the highest logit at that token. It is captured with the
model, and takes the same time for all contenders.
"""

import gc
import re
import weakref
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.device import free_bytes
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._decoder import LAYER
from sparsebench.kernels.nn._served_model import model_of, plan
from sparsebench.results.record import Problem

TESTED = (5, 17), (5, 23)  # versions of transformers, the first and the last
FLASH, MASKED = "flash_attention_3", "sdpa"
PAGE = 64  # tokens of a page of the cache
ROOM = 1.5  # pages over those of the requests at once: the scheduler leaves a fifth free
SPARE = 2 << 30  # bytes beside the weights and the cache: graphs, masks and activations
PATIENCE_S = 60.0  # most time between two requests that end


def prepare(
    operands: Operands,
    *,
    graphs: bool = True,
    overlap: bool = True,
    flash: bool = True,
    rows: int = 32,
    reads: int | None = None,
    chunk: int = 512,
) -> Launch:
    """Start a server.

    graphs   capture steps as CUDA graphs
    overlap  prepare a step while the step before runs (`use_async_batching`)
    flash    run flash attention, in 16 bits, if its package is installed
    rows     tokens to a multiple of which a step is padded
    reads    tokens of the cache, likewise; default: a sixteenth of what the longest requests have,
             so that a load needs few graphs
    chunk    most tokens of a step

    Raises Unsupported.
    """
    on_gpu = operands.device.type == "cuda"
    choice: dict[str, Any] = {"graphs": graphs and on_gpu, "overlap": overlap and on_gpu}
    load = RequestLoad(operands)
    choice["attention"] = FLASH if flash and on_gpu and has_flash(operands.problem) else MASKED
    choice |= {"rows": rows, "reads": reads or load.reads, "chunk": chunk}
    require_room(operands, load)
    model = model_of(operands)
    if on_gpu:
        plan(model, range(rows, chunk + 1, rows))
        torch.cuda.synchronize(operands.device)  # the server has a stream of its own
    server = Server(model, load, choice)
    return Launch(
        server.serve,
        {**choice, "transformers": version("transformers")},
        readings=lambda: server.readings,
    )


class RequestLoad:
    """The requests, as a problem states them.

    tokens   [requests, longest] on the device; redrawn between calls
    lengths  of each prompt, and its new tokens
    """

    def __init__(self, operands: Operands) -> None:
        problem = operands.problem
        self.concurrency: int = problem["concurrency"]
        self.tokens = operands.activations["tokens"]
        lengths = operands.activations["lengths"].tolist()
        self.lengths: list[tuple[int, int]] = [(prompt, new) for prompt, new in lengths]

    @property
    def longest(self) -> int:
        return max(prompt + new for prompt, new in self.lengths)

    @property
    def pages(self) -> int:
        """Return the pages of the cache."""
        return ceil(ROOM * self.concurrency * (self.longest // PAGE + 1)) + 4

    @property
    def reads(self) -> int:
        """Return the tokens of the cache to a multiple of which a step's are padded."""
        return max(4 * PAGE, 1 << (self.concurrency * self.longest // 16).bit_length())

    def prompts(self) -> list[list[int]]:
        rows = self.tokens.tolist()
        return [row[:prompt] for row, (prompt, _) in zip(rows, self.lengths, strict=True)]


# ---- the server ----


class TeacherForcing:
    """The hook behind the model: it stores the last logits of requests, and forces tokens.

    Row 0 of `out` takes what belongs to no request: steps before the last, and padding, token 0.
    """

    def __init__(self, load: RequestLoad, vocab: int, dtype: torch.dtype) -> None:
        self.count = len(load.lengths) + 1
        self.kinds = vocab // self.count
        last = [-1, *(prompt + new - 2 for prompt, new in load.lengths)]
        self.last = torch.tensor(last, device=load.tokens.device)
        self.out = torch.empty(self.count, vocab, dtype=dtype, device=load.tokens.device)

    def __call__(self, _module: Any, _args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        tokens, position = kwargs["input_ids"][0].long(), kwargs["position_ids"][0].long()
        rows = kwargs.get("logits_to_keep")
        if isinstance(rows, Tensor):
            tokens, position = tokens[rows], position[rows]
        logits = output.logits[0]
        request = tokens % self.count
        place = torch.where(position == self.last[request], request, 0)
        self.out.index_copy_(0, place, logits)
        u = (5 * (tokens // self.count) + position + 1) % self.kinds
        logits.scatter_(1, (self.count * u + request)[:, None], torch.inf)


class Server:
    """A model that serves a load; its thread ends when nothing refers to the server any more.

    readings  of the last call, in µs, by the names of Op.readings
    """

    def __init__(self, model: Any, load: RequestLoad, choice: Mapping[str, Any]) -> None:
        from transformers import GenerationConfig

        self.load, self.readings, self.calls = load, dict[str, float](), 0
        self.first_us = self.cold_us = 0.0
        self.forcing = TeacherForcing(load, model.config.vocab_size, model.dtype)
        model.register_forward_hook(self.forcing, with_kwargs=True)
        prefix = "" if has_option("auto_switch_to_flash") else "paged|"
        model.set_attn_implementation(prefix + choice["attention"])
        make: Any = GenerationConfig
        greedy = make(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self.manager = model.init_continuous_batching(greedy, configuration(load, choice))
        self.manager.warmup()
        self.steps = StepClock(self.manager.batch_processor)
        self.manager.start()
        self.close = weakref.finalize(self, stop, self.manager)

    def serve(self) -> Tensor:
        """Serve all requests; return the last logits of each, [requests, vocab]."""
        self.steps.clear()
        self.calls += 1
        if self.calls == 1:  # garbage of the start, which a first request would wait for
            gc.collect()
        waiting = list(enumerate(self.load.prompts()))[::-1]
        ended: list[tuple[float, float]] = []
        for _ in range(self.load.concurrency):
            self._add(*waiting.pop())
        while len(ended) < len(self.load.lengths):
            ended.append(self._next())
            if waiting:
                self._add(*waiting.pop())
        if self.forcing.out.is_cuda:
            torch.cuda.synchronize(self.forcing.out.device)
        first_us = fmean(first for first, _ in ended)
        self.cold_us = self.cold_us or self.first_us
        self.readings = {
            "steps": self.steps.sum_us(),
            "first_token": first_us,
            "per_token": fmean(later for _, later in ended),
            "cold": self.cold_us,
        }
        return self.forcing.out[1:]

    def _add(self, number: int, prompt: list[int]) -> None:
        _, new = self.load.lengths[number]
        timed = {"record_timestamps": True, "eos_token_id": -1}
        name = f"{self.calls}.{number}"  # calls differ: a step of the last one may still run
        self.manager.add_request(prompt, request_id=name, max_new_tokens=new, **timed)

    def _next(self) -> tuple[float, float]:
        """Return µs to the first token and between later ones, of the next request that ends."""
        result = self.manager.get_result(timeout=PATIENCE_S)
        if result is None:
            raise RuntimeError(f"expected a request to end in {PATIENCE_S:g} s, found none")
        number = int(result.request_id.partition(".")[2])
        _, new = self.load.lengths[number]
        if result.error or len(result.generated_tokens) != new:
            actual = result.error or f"{len(result.generated_tokens)} tokens"
            raise RuntimeError(f"request {number}: expected {new} tokens, found {actual}")
        times = result.timestamps
        first_us = 1e6 * (times[0] - result.created_time)
        if number == 0:
            self.first_us = first_us
        return first_us, 1e6 * (times[-1] - times[0]) / max(new - 1, 1)


POOLS: list[Any] = []
"""Pools of memory that a graph still uses, until it is freed."""


def stop(manager: Any) -> None:
    """End the thread, and free the cache.

    The garbage that `manager.stop` collects has the graphs and the pool of their memory, in any
    order. Some versions of torch abort if a pool is freed before a graph, or after a capture that
    failed, which also counts as a user. A GPU test ended so; the pool is therefore freed last.
    """
    pool = manager.batch_processor.model_runner.mem_pool
    manager.stop(block=True, timeout=PATIENCE_S)
    manager.destroy()
    POOLS[:] = [each for each in (*POOLS, pool) if each is not None and each.use_count() > 1]


class StepClock:
    """The device time of the steps of a call: events around each, on the stream of the model.

    It refers to the processor weakly, so that a server that has ended keeps no graph.
    """

    def __init__(self, processor: Any) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self.host_us: list[float] = []
        self.processor = weakref.proxy(processor)
        processor.model_runner.compute_batch = self

    def __call__(self, *batch: Any) -> None:
        runner = self.processor.model_runner
        run = partial(type(runner).compute_batch, runner)
        stream = self.processor.inputs_and_outputs.compute_stream
        if stream is None:
            began = perf_counter()
            run(*batch)
            self.host_us.append(1e6 * (perf_counter() - began))
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        run(*batch)
        after.record(stream)
        self.pairs.append((before, after))

    def clear(self) -> None:
        self.pairs.clear()
        self.host_us.clear()

    def sum_us(self) -> float:
        of_device: float = sum(1e3 * before.elapsed_time(after) for before, after in self.pairs)
        return sum(self.host_us) + of_device


def configuration(load: RequestLoad, choice: Mapping[str, Any]) -> Any:
    """Return ContinuousBatchingConfig; its names differ between the TESTED versions."""
    from transformers import ContinuousBatchingConfig

    options: dict[str, Any] = {"page_size" if has_option("page_size") else "block_size": PAGE}
    if has_option("auto_switch_to_flash"):
        options["auto_switch_to_flash"] = False
    return ContinuousBatchingConfig(
        **options,
        num_blocks=load.pages,
        max_batch_tokens=choice["chunk"],
        max_requests_per_batch=load.concurrency,
        max_blocks_per_request=0,  # all steps take one path: that of decoding alone was not tested
        allow_block_sharing=False,
        use_cuda_graph=choice["graphs"],
        use_async_batching=choice["overlap"],
        q_padding_interval_size=choice["rows"],
        kv_padding_interval_size=choice["reads"],
    )


def has_option(option: str) -> bool:
    """Return whether this version of transformers has an option of continuous batching."""
    from transformers import ContinuousBatchingConfig

    return option in {each.name for each in fields(ContinuousBatchingConfig)}


def has_flash(problem: Problem) -> bool:
    """Return whether transformers finds flash_attn_3, and it multiplies this dtype."""
    from transformers.utils.import_utils import is_flash_attn_3_available

    return problem["dtype"] != "fp32" and bool(is_flash_attn_3_available())


# ---- what cannot run ----


def unsupported(problem: Problem, device: torch.device) -> str | None:
    return unsupported_version()


def unsupported_version() -> str | None:
    """Return why sparse layers may fail with the transformers here, or None if it was tested."""
    tested = " to ".join(".".join(map(str, each)) for each in TESTED)
    try:
        present = version("transformers")
    except PackageNotFoundError:
        present = "none"
    major, minor = (*re.findall(r"\d+", present), "0", "0")[:2]
    fits = TESTED[0] <= (int(major), int(minor)) <= TESTED[1]
    return None if fits else f"expected transformers {tested}, found {present}"


def require_room(operands: Operands, load: RequestLoad) -> None:
    """Raise Unsupported unless copies of the weights and the cache fit into the free memory."""
    if operands.device.type != "cuda":
        return
    problem, weights = operands.problem, operands.weights
    copied = sum(weights[name].stored_bytes for name in LAYER)
    itemsize = weights["wqkv"].to_dense().itemsize
    token = 2 * itemsize * problem["kv_heads"] * problem["head_dim"]
    of_cache = problem["layers"] * token * PAGE * (load.pages + 2)
    needed = problem["layers"] * copied + of_cache + SPARE
    room = free_bytes(operands.device)
    if needed > room:
        pages = f"of which {of_cache / 1e9:.1f} GB are pages of the cache"
        actual = f"found a device that has room for {room / 1e9:.1f} GB"
        raise Unsupported(f"needs {needed / 1e9:.1f} GB, {pages}; {actual}")


KERNEL = Kernel("serving", "any", "any", prepare, unsupported)
