"""The lines of the page by which transformers serves a sparse checkpoint, on a CPU."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from sparsebench.nn import TwoFour, sparsify_
from tests.harness.tiny_models import tiny, tokenizer
from tests.tools.paths import ROOT

MISSING = [name for name in ("fastapi", "openai", "uvicorn") if find_spec(name) is None]
MISSING += ["curl"] if shutil.which("curl") is None else []
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"transformers serve needs {MISSING}")

PAGE = (ROOT / "kernels/nn/MIGRATION.md").read_text(encoding="utf-8")
PART = PAGE.partition("## Serve it: transformers")[2].partition("\n## ")[0]
SERVER, REQUEST = re.findall(r"^(?:python|curl) .*$", PART, re.MULTILINE)
FOLDER = "llama-spense"
(SMALL,) = re.findall(r"`(--device cpu [^`]*)`", PART)  # the cache takes all memory otherwise
PATIENCE = 600  # seconds until the server answers
RUNNING = r"running on http://(\S+)"
LEAD = 0.1  # of the standard deviation of logits, 15 times the rounding of the largest in bf16


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run the page's server in a folder until the block ends; yield its address."""
    _, *words = shlex.split(SERVER)
    command = [sys.executable, "-P", *words, *shlex.split(SMALL), "--port", "0"]
    log, offline = folder / "log", {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, cwd=folder, env=offline, stdout=file, stderr=file)
        try:
            end = monotonic() + PATIENCE
            while not (match := re.search(RUNNING, lines := log.read_text(encoding="utf-8"))):
                assert process.poll() is None, lines
                assert monotonic() < end, lines
                sleep(0.2)
            yield match[1]
        finally:
            process.kill()
            process.wait()


def draw_a_clear_head(model: Any, prompt: Any) -> None:
    """Draw output heads until each next token leads by more than rounding can take away."""
    for seed in range(200):
        draw = torch.Generator().manual_seed(seed)
        head = model.lm_head.weight
        head.data.copy_(torch.randn(head.shape, generator=draw))
        best = generated(model, prompt, output_logits=True, return_dict_in_generate=True)
        logits = torch.stack(best.logits).float()
        first, second = logits.topk(2).values.unbind(-1)
        if (first - second).min() > LEAD * logits.std():
            return
    pytest.fail("expected a head whose tokens are clear, found none")


def generated(model: Any, prompt: Any, **options: Any) -> Any:
    return model.generate(**prompt, max_new_tokens=8, do_sample=False, **options)


def test_the_server_of_transformers_answers_as_generate(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sparsify_(tiny(dtype=torch.bfloat16), TwoFour(), tokens=())
    letters = tokenizer()
    prompt = letters("The", return_tensors="pt")
    draw_a_clear_head(model, prompt)
    model.save_pretrained(tmp_path / FOLDER)
    letters.save_pretrained(tmp_path / FOLDER)
    with server(tmp_path) as address:
        request = shlex.split(REQUEST.replace("localhost:8000", address))
        command = [*request, "--silent", "--fail-with-body"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout
    (choice,) = json.loads(done.stdout)["choices"]
    tokens = generated(model, prompt)[0, prompt["input_ids"].shape[1] :]
    assert choice["text"] == letters.decode(tokens, skip_special_tokens=True)
