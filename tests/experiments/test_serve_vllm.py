"""The script experiments/serve_vllm.py, without vLLM: its requests, its turns and its models."""

import json
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import serve_vllm
from serve_vllm import SERVERS, ServerProcess, contest, folder_of, serve, summary

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs.request_lengths import lengths_of


class FakeEngine:
    """An engine that gives each of its requests a token in a step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.most = self.made = 0

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        assert prompt["prompt_token_ids"]
        self.left[name] = params.max_tokens
        self.most = max(self.most, len(self.left))

    def step(self) -> list[Any]:
        self.made += len(self.left)
        self.left = {name: left - 1 for name, left in self.left.items()}
        ended = [SimpleNamespace(request_id=name, finished=not n) for name, n in self.left.items()]
        self.left = {name: left for name, left in self.left.items() if left}
        return ended


@pytest.fixture
def vllm(monkeypatch) -> None:
    fake: Any = ModuleType("vllm")
    fake.SamplingParams = lambda **options: SimpleNamespace(**options)
    params: Any = ModuleType("vllm.sampling_params")
    params.RequestOutputKind = SimpleNamespace(DELTA=1)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


@pytest.mark.usefixtures("vllm")
def test_so_many_requests_are_served_at_once_and_make_all_tokens() -> None:
    engine = FakeEngine()
    times = serve(engine, (3, 8), 0)
    assert engine.most == 3
    assert engine.made == sum(new for _, new in lengths_of("short", 8))
    assert 0 <= times["first_token_ms"] < times["ms"]


class FakeServer:
    """A server that takes so many ms, or does not start."""

    def __init__(self, server: str, ms: float | None, turns: list[str]) -> None:
        self.server, self.ms, self.turns, self.log = server, ms, turns, "log"

    def answer(self) -> dict[str, float] | None:
        return {"start_s": 1.0} if self.ms else None

    def run(self, load: Any) -> dict[str, float] | None:
        self.turns.append(self.server)
        return {"ms": self.ms} if self.ms else None


def test_servers_take_turns_and_one_that_does_not_start_is_a_line() -> None:
    turns: list[str] = []
    times = {"dense": 200.0, "2:4": 160.0, "fp8": None}
    servers: list[Any] = [FakeServer(name, ms, turns) for name, ms in times.items()]
    lines = [{"process": 0, **line} for line in contest(servers, [(2, 4)], 2)]
    assert turns == ["dense", "2:4"] * 2 + ["2:4", "dense"]
    assert [line["server"] for line in lines if "error" in line] == ["fp8"]
    text = "\n".join(summary(lines))
    assert "2 at once, dense: 20.0 requests per second" in text
    assert "2 at once, 2:4: 25.0 requests per second, 1.2" in text


def test_a_round_without_dense_has_no_ratio() -> None:
    at = {"concurrency": 1, "requests": 1, "process": 0}
    turns = [("dense", 1, 4.0), ("2:4", 0, 1.0), ("2:4", 1, 2.0)]
    lines = [{**at, "server": name, "round": turn, "ms": ms} for name, turn, ms in turns]
    assert " 2.0" in [*summary(lines)][1]


@pytest.mark.parametrize(
    "options",
    [
        {"loads": "8"},
        {"loads": "8:4"},  # no requests would be left to add
        {"loads": "0:4"},  # none would ever end
        {"loads": "8:16:3"},
        {"loads": "1:1,"},
        {"loads": "129:256"},
        {"servers": "dense,24"},  # would be served dense
        {"servers": "dense,2:4,2:4"},
        {"out": Path("missing/served.jsonl")},
    ],
)
def test_a_wrong_option_is_refused_before_a_server_starts(options: Any, monkeypatch) -> None:
    monkeypatch.setattr(serve_vllm, "ServerProcess", None)
    with pytest.raises(SuiteError):
        serve_vllm.main(**options)


def test_a_server_is_a_process_that_answers_loads(tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "echo.py"
    script.write_text(
        "import sys\nfor line in sys.stdin: print('served {\"ms\": 2}', flush=True)\n"
    )
    monkeypatch.setattr(serve_vllm, "__file__", str(script))
    server = ServerProcess("dense", 1, False, tmp_path / "log")
    assert server.run((1, 1)) == {"ms": 2}
    serve_vllm.close([server])
    assert server.process.poll() == 0


def test_a_server_that_does_not_end_is_killed_with_its_engine(tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "hangs.py"
    engine = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    script.write_text(
        f"import subprocess, sys, time\np = {engine}\n"
        "print('served', p.pid, flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(serve_vllm, "__file__", str(script))
    monkeypatch.setattr(serve_vllm, "PATIENCE_S", 0.1)
    server = ServerProcess("dense", 1, False, tmp_path / "log")
    of_engine: Any = server.answer()
    serve_vllm.close([server])
    assert server.process.wait(10) == -signal.SIGKILL
    for _ in range(100):
        if not is_running(of_engine):
            break
        time.sleep(0.05)
    assert not is_running(of_engine)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("server", SERVERS.split(","))
def test_a_model_has_a_configuration_and_its_recipe(server: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(server, 3, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["head_dim"]) == (3, 128)
    assert ("quantization_config" in config) == (server == "w4a16")
    assert (folder / "sparsebench.json").exists() == (server in serve_vllm.RECIPES)
