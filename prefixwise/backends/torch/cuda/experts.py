"""A mixture of experts on Hopper, in kernels that a CUDA graph can hold: the host never learns how many rows an expert
has.

    tokens -> router -> rows in the order of their experts -> one grouped GEMM each for gate-up and down -> their sum

No row's bits depend on another row: the router's kernel adds in one order, so do the grouped GEMMs, and a token's
outputs are added in the order of its own experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixwise.backends.torch.cuda.elementwise_kernels import jit, launch
from prefixwise.backends.torch.elementwise import ElementwiseOps
from prefixwise.backends.torch.experts import add_outputs, route
from prefixwise.backends.torch.weights import ExpertWeights
from prefixwise.models.config import ModelConfig

_CAPABILITY = (9, 0)  # Hopper: elsewhere PyTorch runs a GEMM for each expert, whose numbers of rows the host must know
_ROW_TILE, _DEPTH_TILE, _MIN_EXPERTS = 64, 64, 16  # of the router's kernel; a dot product has at least 16 columns


@jit
def router_kernel(
    x: tl.tensor,  # [T, D] bfloat16
    weight: tl.tensor,  # [E, D] float32
    out: tl.tensor,  # [T, E] float32
    num_rows: tl.tensor,
    depth: tl.constexpr,
    num_experts: tl.constexpr,
    row_tile: tl.constexpr,
    expert_tile: tl.constexpr,
    depth_tile: tl.constexpr,
) -> None:
    """Products of bfloat16, added in float32. A weight is the sum of three of them, which have all its bits."""
    rows = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    experts = tl.arange(0, expert_tile)
    is_row, is_expert = rows[:, None] < num_rows, experts[:, None] < num_experts
    total = tl.zeros((row_tile, expert_tile), tl.float32)
    for start in range(0, depth, depth_tile):
        columns = start + tl.arange(0, depth_tile)
        is_column = columns[None, :] < depth
        read = tl.load(x + rows[:, None].to(tl.int64) * depth + columns[None, :], mask=is_row & is_column, other=0.0)
        wide = tl.load(weight + experts[:, None] * depth + columns[None, :], mask=is_expert & is_column, other=0.0)
        high = wide.to(tl.bfloat16)
        middle = (wide - high.to(tl.float32)).to(tl.bfloat16)
        low = (wide - high.to(tl.float32) - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(read, tl.trans(low), total)
        total = tl.dot(read, tl.trans(middle), total)
        total = tl.dot(read, tl.trans(high), total)
    places = out + rows[:, None].to(tl.int64) * num_experts + experts[None, :]
    tl.store(places, total, mask=is_row & (experts[None, :] < num_experts))


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] bfloat16, weight [E, D] float32 to [T, E] float32."""
    (num_rows, depth), num_experts = x.shape, len(weight)
    out = x.new_empty(num_rows, num_experts, dtype=torch.float32)
    launch(
        router_kernel,
        (triton.cdiv(num_rows, _ROW_TILE),),
        *(x, weight, out, num_rows),
        depth=depth,
        num_experts=num_experts,
        row_tile=_ROW_TILE,
        expert_tile=max(triton.next_power_of_2(num_experts), _MIN_EXPERTS),
        depth_tile=_DEPTH_TILE,
    )
    return out


def has_grouped_gemm(weights: ExpertWeights) -> bool:
    """Can `run_experts` run these?"""
    matrices = weights.gate_up
    if not isinstance(matrices, Tensor) or matrices.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(matrices.device) == _CAPABILITY


def run_experts(weights: ExpertWeights, x: Tensor, config: ModelConfig, ops: ElementwiseOps) -> Tensor:
    """The MLP of a layer with experts: x [T, D] to [T, D]."""
    assert config.experts is not None and isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor)
    num_choices, num_experts = config.experts.experts_per_token, config.experts.num_experts
    routing = route(router_logits(x, weights.router), config.experts)
    flat = routing.numbers.flatten()
    order = torch.argsort(flat, stable=True)  # the choices of expert 0, those of expert 1, ...
    counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    inner = _grouped_gemm(x.index_select(0, order // num_choices), weights.gate_up, ends)
    done = _grouped_gemm(ops.gate(inner, config.activation), weights.down, ends)
    outputs = torch.empty_like(done).index_copy_(0, order, done)
    return add_outputs(routing.weights, outputs.view(len(x), num_choices, -1))


def _grouped_gemm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [R, in], whose rows of expert e end before ends[e], times weight [E, out, in] to [R, out]."""
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
