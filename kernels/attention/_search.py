"""The search of the forward kernels in Triton, attention_triton and attention_split."""

from collections.abc import Callable, Sequence
from typing import Any

from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.triton import COMPILE_THREADS, BoundKernel, Path, choose_path
from sparsebench.kernels._common.tuned_table import Tuned, choose
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.attention._lists import lists_of
from sparsebench.kernels.attention._shapes import Bound, table_sizes, task_of, unsupported_by_tma


def fastest_forward(
    name: str,
    config: Callable[..., Any],
    configurations: Callable[..., Sequence[Any]],
    launch: Callable[..., Bound[BoundKernel]],
    operands: Operands,
    path: Path | None,
    tuned: Tuned,
) -> Launch:
    """Sort the lists; take a table's configuration, or compile and time a few.

    name            of the kernel
    config          makes a configuration from its fields; `shared` is one of them
    configurations  returns those of a shape, shared heads and a path, the default first
    launch          binds the kernel
    path            forces one path

    Raises Unsupported.
    """
    tensors, mask, shape, shared, scale = task_of(operands)
    path = choose_path(path, unsupported_by_tma(*tensors, head_dim=shape.head_dim), operands.device)
    searched, sizes = configurations(shape, shared, path), table_sizes(shape, mask)
    configs, by = choose(name, config, operands, sizes, tuned, searched, shared=shared)
    lists = lists_of(mask)
    candidates = [launch(tensors, mask, shape, scale, c, lists).program for c in configs]
    return fastest_launch(configs, candidates, by, operands.device, COMPILE_THREADS)
