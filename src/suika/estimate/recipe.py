"""`Recipe`: what the software does that a layout does not say: kernels, overlap, bytes of gradients, host speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["flash", "flash-cudnn", "flash-triton", "unfused"]


@dataclass(frozen=True)
class Recipe:
    """How a training framework runs a layout. The default is a current Megatron-style stack in bf16.

    `host_scale` multiplies the host time that a layer costs (1 = fused kernels called from eager PyTorch).
    `grad_bytes`, `gather_bytes`: bytes per parameter of the gradient reduction and of the parameter all-gather.
    """

    attention: Attention = "flash"
    vector_scale: float = 1.0  # bytes of unfused element-wise work relative to a fused layer
    dropout: bool = False
    host_scale: float = 1.0
    cuda_graphs: bool = False
    update_scale: float = 1.0  # host time of an update: 1 = sharded optimizer, gradient norm, parameters copied back
    dp_overlap: bool = True
    tp_overlap: bool = False
    p2p_overlap: bool = True
    p2p_split: bool = False  # each tp rank sends its part of the activations between stages
    grad_bytes: float = 4.0
    gather_bytes: float = 2.0
    fp8_scale: float = 1.0  # time of the low-precision GEMMs relative to per-tensor scaling
    fused_loss: bool = True
    pads_vocabulary: bool = True  # to whole tiles on each tp rank
    lora: bool = False
    loose_activations: bool = False  # norms, rotary and activation keep copies that fused kernels recompute
    dp_inside_pp: bool = False  # dp ranks adjacent (Megatron) rather than pp ranks (our mesh)
    optimizer_bytes: float = 44.0  # read and written per owned parameter by one update
    accumulate_bytes: float = 0.0  # per parameter and micro-batch, to add a gradient that its product has not added
    cp_all_to_all: bool = False


DEFAULT = Recipe()
# The built-in trainer: nothing overlaps, gradients and parameters travel in their own precision, autograd adds them up.
BUILT_IN = Recipe(
    dp_overlap=False,
    p2p_overlap=False,
    fused_loss=False,
    pads_vocabulary=False,
    loose_activations=True,
    optimizer_bytes=80.0,
    accumulate_bytes=12.0,
)
