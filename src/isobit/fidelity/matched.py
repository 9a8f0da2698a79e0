"""The reference with the roundings that isobit declares: what is left is the rounding of float32 sums.

isobit rounds twice where float32 transformers does not: the rotated inputs of a quantized linear layer to half
precision, and the attention's keys and values. With the same two roundings in the reference, a wrong weight or a
rounding in another place stands out a hundred times more clearly.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.qwen4_exp.modeling_qwen4_exp import eager_attention_forward

from isobit.checkpoint.names import required_tensors
from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.trellis import BLOCK
from isobit.checkpoint.weights import Exl3Linear
from isobit.fidelity.parameters import reference_name
from isobit.fidelity.reference import Reference
from isobit.fidelity.tensors import inner_values

CPU = torch.device("cpu")
HALF_CACHE = "isobit_half_cache"
HALF_MAX = 65504.0
ROTATION = float(np.float32(1 / np.sqrt(128)))

Forward = Callable[..., torch.Tensor]


@contextmanager
def matched_roundings(reference: Reference, checkpoint: Checkpoint) -> Iterator[None]:
    """While in this context, the reference rounds where isobit does."""
    config = reference.model.config
    attention, config._attn_implementation = config._attn_implementation, HALF_CACHE
    with ExitStack() as stack:
        stack.callback(setattr, config, "_attn_implementation", attention)
        for name, forward in _forwards(checkpoint, reference.device):
            module = reference.model.get_submodule(name)
            module.forward = forward
            stack.callback(delattr, module, "forward")
        yield


def _forwards(checkpoint: Checkpoint, device: torch.device) -> Iterator[tuple[str, Forward]]:
    experts: dict[str, None] = {}
    for group in required_tensors(checkpoint.config, mtp=False):
        if ".experts." in group.name:
            experts[group.name.split(".experts.")[0] + ".experts"] = None
        elif group.kind == "linear":
            linear = checkpoint.linear(group.name)
            if isinstance(linear, Exl3Linear):
                yield reference_name(group.name), exl3_forward(linear, device)
    for name in experts:
        yield reference_name(name), _experts_forward(checkpoint, name, device)


def exl3_forward(linear: Exl3Linear, device: torch.device = CPU) -> Forward:
    """y = ((half((x * suh) H) W_q) H) * svh + bias, float32 [..., in_features] -> [..., out_features]."""
    suh, svh = (torch.from_numpy(scale.astype(np.float32)).to(device) for scale in (linear.suh, linear.svh))
    bias = None if linear.bias is None else torch.from_numpy(linear.bias.astype(np.float32)).to(device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        rotated = half(rotate(F.pad(x, (0, linear.k - linear.in_features)) * suh))
        y = rotate(F.linear(rotated, inner_values(linear, device).T)) * svh
        y = y if bias is None else y + bias
        return y[..., : linear.out_features]

    return forward


def _experts_forward(checkpoint: Checkpoint, name: str, device: torch.device) -> Forward:
    def part(expert: int, projection: str) -> Forward:
        linear = checkpoint.linear(f"{name}.{expert}.{projection}")
        if isinstance(linear, Exl3Linear):
            return exl3_forward(linear, device)
        weight = torch.from_numpy(np.array(linear.weight, np.float32)).to(device)
        return lambda x: F.linear(x, weight)

    def forward(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            rows, places = torch.where(ids == expert)
            hidden = F.silu(part(expert, "gate_proj")(x[rows])) * part(expert, "up_proj")(x[rows])
            total.index_add_(0, rows, part(expert, "down_proj")(hidden) * weights[rows, places, None])
        return total

    return forward


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The 128x128 Sylvester-Hadamard rotation of each block of the last axis, by butterflies from stride 1."""
    for stride in (1 << i for i in range(BLOCK.bit_length() - 1)):
        upper, lower = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((upper + lower, upper - lower), dim=-2).flatten(-3)
    return x * ROTATION


def half(x: torch.Tensor) -> torch.Tensor:
    """Rounded to half precision, saturating, in float32."""
    return x.clamp(-HALF_MAX, HALF_MAX).half().float()


def _half_cache_attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return eager_attention_forward(module, query, half(key), half(value), *args, **kwargs)


AttentionInterface.register(HALF_CACHE, _half_cache_attention)
AttentionMaskInterface.register(HALF_CACHE, eager_mask)
