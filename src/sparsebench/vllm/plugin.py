"""Serve sparse checkpoints in vLLM, and dense ones that a recipe makes sparse.

    vllm serve llama-2of4 --load-format sparsebench          what save_pretrained or convert wrote
    vllm serve llama --quantization sparsebench              dense, with llama/sparsebench.json

vLLM calls `register` in each of its processes (the entry point `vllm.general_plugins`).

    config.py    which layers become sparse, and how
    loader.py    yields the packed layers of a checkpoint as dense weights, which vLLM shards
    linear.py    one linear layer of vLLM: packs its shard, plans it, multiplies by it
    packing.py, unpacking.py    dense weights <-> sparse layers; these need no vLLM
"""

import logging
from importlib import import_module

logger = logging.getLogger("vllm.sparsebench")


def register() -> None:
    """Register the quantization method and the load format `sparsebench`, once in a process.

    If this vLLM lacks what they need, say so in one line, because vLLM imports every plug-in.
    """
    try:
        for name in ("config", "loader"):
            import_module(f"sparsebench.vllm.{name}")
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("sparsebench is not registered: %s", error)
