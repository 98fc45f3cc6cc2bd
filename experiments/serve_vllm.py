"""Serve a model of Qwen3-8B's shape in vLLM: dense, sparse by the plug-in, in fp8 and in 4 bits.

    serve_vllm.py --out served.jsonl        needs vLLM (kernels/nn/MIGRATION.md), and one GPU

    this process ──load──> server "dense"     a process with an engine, whose weights are random
                 ──load──> server "2:4"       the same model, and a recipe for its MLPs
                 ...                          in turn; every second round in reverse

A load is `concurrency:requests`: so many requests are served at once, and a new one begins when one
ends, with the lengths of harness/inputs/request_lengths.py. Every server makes as many tokens,
because requests do not end early. Nothing is cached between them. All steps are CUDA graphs, and
inductor compiles none of them; `--compiled` takes vLLM's default instead. A server serves a load
twice in a turn: the first call wakes it, and the second one is timed.

The file has a line for each timed call: ms of all requests, ms to the first token and ms between
later ones, the last two as means over requests. `--replicates` repeats everything in fresh
processes. If a server does not start, its line has an error, and the others go on.

tests/vllm/test_engine.py compares the logits of sparse models with those of dense ones.
"""

import json
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from subprocess import PIPE, Popen, TimeoutExpired
from time import perf_counter
from typing import Annotated, Any, TextIO, cast

import typer

from sparsebench.errors import SparsebenchError, SuiteError
from sparsebench.harness.inputs.request_lengths import lengths_of
from sparsebench.harness.models.reporting import require_writable
from sparsebench.results.formatting import between

SIZES = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "2:4": {"recipe": "TwoFour"},
    "half 2:4": {"recipe": "TwoFour", "dense": 0.5},
    "blocks": {"recipe": "BlockSparse", "block": 64, "sparsity": 0.8},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
SERVERS, LOADS = "dense,2:4,half 2:4,blocks,fp8,w4a16", "8:16,32:32,1:1,128:128"
MOST_REQUESTS, CHUNK = 128, 512  # at once; tokens of a step
PROMPT_TOKENS = 10_000  # of the vocabulary, from which prompts are drawn
GRAPH_TOKENS = [1, 2, 4, 8, 16, 24, *range(32, CHUNK + 1, 32)]
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": GRAPH_TOKENS}
PATIENCE_S = 20  # for all servers to end
MARK = "served "  # a line of a server that is not vLLM's
Load = tuple[int, int]


# ---- a server ----


def folder_of(server: str, layers: int, place: Path) -> Path:
    """Return a new folder with the configuration of a model, and its recipe."""
    from transformers import Qwen3Config

    folder = place / server.replace(" ", "-").replace(":", "-")
    folder.mkdir()
    config = Qwen3Config(**SIZES, num_hidden_layers=layers).to_dict()
    config |= {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    if server == "w4a16":
        config["quantization_config"] = GPTQ
    (folder / "config.json").write_text(json.dumps(config))
    if server in RECIPES:
        recipe = {**RECIPES[server], "layers": ["*.mlp.*"]}
        (folder / "sparsebench.json").write_text(json.dumps(recipe))
    return folder


def engine_of(server: str, layers: int, compiled: bool, place: Path) -> Any:
    """Return vLLM's engine, after it has started, with a server's model."""
    from vllm import LLM

    graphs = {"cudagraph_capture_sizes": GRAPH_TOKENS} if compiled else GRAPHS
    method = "sparsebench" if server in RECIPES else "fp8" if server == "fp8" else None
    llm = LLM(
        str(folder_of(server, layers, place)),
        load_format="dummy",
        quantization=method,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=MOST_REQUESTS,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.12,  # servers share a card
        kv_cache_memory_bytes=3 << 30,
        compilation_config=graphs,
    )
    return llm.llm_engine


def serve(engine: Any, load: Load, call: int) -> dict[str, float]:
    """Serve a load, and return its times in ms. `call` is the seed of its prompts."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    concurrency, requests = load
    lengths = {f"{call}.{i}": each for i, each in enumerate(lengths_of("short", requests))}
    generator, waiting = random.Random(call), list(lengths)[::-1]
    prompts = {
        name: generator.choices(range(PROMPT_TOKENS), k=p) for name, (p, _) in lengths.items()
    }
    added, first, last = dict[str, float](), dict[str, float](), dict[str, float]()

    def add() -> None:
        name = waiting.pop()
        options = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        kind = RequestOutputKind.DELTA
        params = SamplingParams(max_tokens=lengths[name][1], output_kind=kind, **options)
        added[name] = perf_counter()
        engine.add_request(name, {"prompt_token_ids": prompts[name]}, params)

    start = perf_counter()
    for _ in range(concurrency):
        add()
    while len(last) < requests:
        for output in engine.step():
            first.setdefault(output.request_id, perf_counter())
            if output.finished:
                last[output.request_id] = perf_counter()
                if waiting:
                    add()
    later = [(last[n] - first[n]) / max(new - 1, 1) for n, (_, new) in lengths.items()]
    return {
        "ms": 1e3 * (perf_counter() - start),
        "first_token_ms": 1e3 * fmean(first[n] - added[n] for n in lengths),
        "per_token_ms": 1e3 * fmean(later),
    }


def run_server(server: str, layers: int, compiled: bool) -> None:
    """Answer each load of the standard input with a line."""
    with tempfile.TemporaryDirectory() as place:
        start = perf_counter()
        engine = engine_of(server, layers, compiled, Path(place))
        print(MARK + json.dumps({"start_s": perf_counter() - start}), flush=True)
        for call, line in enumerate(sys.stdin):
            load: Any = json.loads(line)
            print(MARK + json.dumps(serve(engine, load, call)), flush=True)


# ---- servers in turn ----


def servers_of(text: str) -> list[str]:
    """Return the servers of `--servers`. Raises SuiteError: an unknown one would be a dense one."""
    names, every = text.split(","), SERVERS.split(",")
    for name in names:
        if name not in every or names.count(name) > 1:
            expected = f"each once of {SERVERS}"
            raise SuiteError(f"--servers: expected {expected}; found {name!r} in {text!r}")
    return names


def loads_of(text: str) -> list[Load]:
    """Return the loads of `--loads`. Raises SuiteError."""
    loads = []
    for part in text.split(","):
        numbers = re.fullmatch(r"([0-9]+):([0-9]+)", part)
        load = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
        if not 1 <= load[0] <= min(load[1], MOST_REQUESTS):
            expected = f"1 to {MOST_REQUESTS} requests at once of as many or more, such as 8:16"
            raise SuiteError(f"--loads: expected {expected}; found {part!r}")
        loads.append(load)
    return loads


class ServerProcess:
    """A server's process."""

    def __init__(self, server: str, layers: int, compiled: bool, log: Path) -> None:
        self.server, self.log = server, log
        environment = os.environ | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
        options = ["--server", server, "--layers", str(layers), *["--compiled"] * compiled]
        command = [sys.executable, __file__, *options]
        with log.open("w") as stderr:
            pipes: Any = {"stdin": PIPE, "stdout": PIPE, "stderr": stderr, "text": True}
            self.process = Popen(command, env=environment, start_new_session=True, **pipes)

    def answer(self) -> dict[str, Any] | None:
        """Return the next answer; None if the process has ended."""
        lines = cast(TextIO, self.process.stdout)
        line = next((line for line in lines if line.startswith(MARK)), None)
        return json.loads(line.removeprefix(MARK)) if line else None

    def run(self, load: Load) -> dict[str, Any] | None:
        """Serve a load twice; return the times of the second call, None if the process ended."""
        pipe, answer = cast(TextIO, self.process.stdin), None
        for _ in range(2):
            with suppress(BrokenPipeError):
                print(json.dumps(load), file=pipe, flush=True)
            answer = self.answer()
        return answer


def close(servers: Sequence[ServerProcess]) -> None:
    """End the processes, and those of their engines, which would keep the GPU's memory."""
    for each in servers:
        with suppress(BrokenPipeError):
            cast(TextIO, each.process.stdin).close()
    end = perf_counter() + PATIENCE_S
    for each in servers:
        with suppress(TimeoutExpired):
            each.process.wait(timeout=max(end - perf_counter(), 0))
        with suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)
        cast(TextIO, each.process.stdout).close()


def main(
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("served.jsonl"),
    servers: str = SERVERS,
    loads: Annotated[str, typer.Option(help="requests at once : requests")] = LOADS,
    rounds: Annotated[int, typer.Option(min=1)] = 12,
    replicates: Annotated[int, typer.Option(min=1)] = 1,
    layers: Annotated[int, typer.Option(help="of 36", min=1)] = 12,
    compiled: Annotated[bool, typer.Option("--compiled", help="vLLM's default")] = False,
    server: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Serve all loads by all servers, in turn."""
    if server:
        run_server(server, layers, compiled)
        return
    require_writable(out)
    names, of_loads, written = servers_of(servers), loads_of(loads), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # and closes servers
    with out.open("w", encoding="utf-8") as file:
        for process in range(replicates):
            logs = [out.with_suffix(f".{i}.log") for i in range(len(names))]
            pairs = zip(names, logs, strict=True)
            running = [ServerProcess(name, layers, compiled, log) for name, log in pairs]
            try:
                for line in contest(running, of_loads, rounds):
                    written.append({"process": process, **line})
                    print(json.dumps(written[-1]), file=file, flush=True)
            finally:
                close(running)
    print(*summary(written), sep="\n")


def contest(
    servers: Sequence[ServerProcess], loads: Sequence[Load], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a line for each server that starts or does not, and for each timed call."""
    starts = {each: each.answer() for each in servers}
    for each, start in starts.items():
        error = {"error": f"expected an engine, found that its process ended: {each.log}"}
        yield {"server": each.server, **(start or error)}
    ready = [each for each, start in starts.items() if start]
    for load in loads:
        for each in ready:
            each.run(load)  # graphs and kernels that it needs for the first time
        for number in range(rounds):
            for each in ready[::-1] if number % 2 else ready:
                if answer := each.run(load):
                    at = {"concurrency": load[0], "requests": load[1], "round": number}
                    yield {"server": each.server, **at, **answer}


def summary(lines: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield requests per second of each load and server, and over dense, round by round."""
    ms: dict[tuple[Load, str], dict[tuple[int, int], float]] = {}  # by process and round
    for line in lines:
        if "ms" in line:
            load, turn = (line["concurrency"], line["requests"]), (line["process"], line["round"])
            ms.setdefault((load, line["server"]), {})[turn] = line["ms"]
    for (load, server), each in ms.items():
        rate, dense = 1e3 * load[1] / median(each.values()), ms.get((load, "dense"), {})
        ratios = sorted(dense[turn] / each[turn] for turn in each.keys() & dense.keys())
        text = between(median(ratios), ratios[0], ratios[-1]) if ratios else ""
        yield f"{load[0]} at once, {server}: {rate:.1f} requests per second, {text} of dense"


if __name__ == "__main__":
    try:
        typer.run(main)
    except SparsebenchError as error:
        sys.exit(f"error: {error}")
