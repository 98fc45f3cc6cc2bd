"""peft's adapters on the layers of a gated MLP, which stay if the MLP becomes dense.

    gate_up    Y = X W.T + scale X A.T B.T         8 rows of gate and 8 of up in turn, in W and in B
    gate_proj  Y = X Wg.T + scale X A.T Bg.T       Bg and Bu are the rows of B
    up_proj    Y = X Wu.T + scale X A.T Bu.T       with a copy of A
    down_proj  the adapter of down

peft wraps a layer, which is then `base_layer` of the wrapper; it is not imported here. Adapters on
other layers need nothing: the layer inside their wrapper becomes dense.
"""

import re
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from sparsebench.formats._format import require
from sparsebench.harness.models.pruning.gated import PARTS, DenseGatedMLP
from sparsebench.kernels.nn import SparseGatedMLP, SpenseGatedMLP
from sparsebench.kernels.nn._packed import unwrapped
from sparsebench.kernels.spense.spense_ffn import parted


def require_separable(mlp: nn.Module) -> None:
    """Raise FormatError if an adapter of this MLP, which becomes dense, cannot stay."""
    if isinstance(mlp, SpenseGatedMLP | SparseGatedMLP):
        names = ("gate_up", "down") if isinstance(mlp, SpenseGatedMLP) else ("gate", "up", "down")
        for name in names:
            layer: Any = getattr(mlp, name)
            plain = unwrapped(layer) is layer
            fits = isinstance(mlp, SpenseGatedMLP) and not getattr(layer, "lora_variant", True)
            actual = f"{type(layer).__module__}.{type(layer).__name__}"
            expected = f"{name}: expected plain LoRA or no adapter, found {actual}"
            require(plain or fits, f"{expected}: unload or delete the adapters first")


def with_adapters(dense: DenseGatedMLP, mlp: SpenseGatedMLP) -> DenseGatedMLP:
    """Return the dense form of an MLP with the adapters of the sparse one."""
    gate_up: Any = mlp.gate_up
    down: Any = mlp.down
    if unwrapped(gate_up) is not gate_up:
        dense.gate_proj = _part(gate_up, dense.gate_proj, 0)
        dense.up_proj = _part(gate_up, dense.up_proj, 1)
    if unwrapped(down) is not down:
        down.base_layer, dense.down_proj = dense.down_proj, down
    return dense


def _part(wrapper: Any, layer: nn.Linear, which: int) -> Any:
    """Return the adapters of gate_up for gate (0) or up (1), around this layer."""
    part = deepcopy(wrapper, {id(wrapper.base_layer): layer})
    part.out_features = layer.out_features
    for b in part.lora_B.values():
        b.out_features = layer.out_features
        for name, parameter in [*b.named_parameters()]:
            rows: Tensor = parted(parameter.detach())[which]
            setattr(b, name, nn.Parameter(rows.clone(), parameter.requires_grad))
    return part


def retarget(model: nn.Module, mlps: Iterable[str]) -> None:
    """Add the layers of MLPs that became dense to those that the adapters' configurations name."""
    names = {
        f"{mlp}.{part}"
        for mlp in mlps
        for part in PARTS
        if hasattr(model.get_submodule(f"{mlp}.{part}"), "base_layer")
    }
    for config in getattr(model, "peft_config", {}).values() if names else ():
        if isinstance(config.target_modules, str):
            config.target_modules = "|".join([config.target_modules, *map(re.escape, names)])
        else:
            config.target_modules = {*config.target_modules, *names}
