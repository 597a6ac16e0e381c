"""Experts in PyTorch: routing is transformers', a row's bits do not depend on the rows beside it, and dtypes that a CPU
emulates are widened expert by expert."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.elementwise import PLAIN, CpuElementwiseOps
from prefixwise.backends.torch.experts import ExpertRunner, add_outputs, choose_tile_sizes, route
from prefixwise.backends.torch.weights import ExpertWeights
from prefixwise.backends.torch.workers import Workers
from prefixwise.models.config import ExpertsConfig
from tests.models.test_config import CONFIG

D, F_SIZE, E, K = 96, 40, 6, 2
EXPERTS = ExpertsConfig(E, K, norms_weights=True)
MODEL = replace(CONFIG, model_size=D, mlp_size=F_SIZE, experts=EXPERTS)


def weights_of(dtype: torch.dtype) -> ExpertWeights:
    random = torch.Generator().manual_seed(0)

    def matrices(rows: int, columns: int) -> tuple[Tensor, ...]:
        return tuple((torch.randn(rows, columns, generator=random) / 8).to(dtype) for _ in range(E))

    router = torch.randn(E, D, generator=random)
    return ExpertWeights(router, matrices(2 * F_SIZE, D), matrices(D, F_SIZE))


def rows_of(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def run(
    weights: ExpertWeights,
    x: Tensor,
    sizes: tuple[int, ...] | None,
    *,
    logits: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    workers = Workers(threads)
    routing = route(F.linear(x.float(), weights.router) if logits is None else logits, EXPERTS)
    ops = PLAIN if sizes is None else CpuElementwiseOps()
    runner = ExpertRunner(MODEL, ops, workers, sizes)
    outputs = workers.drive(lambda: add_outputs(routing.weights, runner(weights, x, routing.numbers)))
    workers.close()
    return outputs


@pytest.mark.parametrize("is_normed", [False, True])
def test_routing_is_that_of_transformers(is_normed: bool) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    theirs = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=D, num_experts=E, num_experts_per_tok=K, norm_topk_prob=is_normed)
    )
    x = rows_of(50)
    with torch.no_grad():
        theirs.weight.copy_(weights_of(torch.float32).router)
        _, weights, numbers = theirs(x)
        found = route(F.linear(x, theirs.weight), replace(EXPERTS, norms_weights=is_normed))
    torch.testing.assert_close(found.weights, weights)
    assert torch.equal(found.numbers, numbers)


@pytest.mark.parametrize("sizes", [None, (16,), (128, 64, 32, 16, 8, 4)])
def test_every_token_gets_the_outputs_of_its_experts(sizes: tuple[int, ...] | None) -> None:
    weights, x = weights_of(torch.float32), rows_of(37)
    routing = route(F.linear(x, weights.router), EXPERTS)
    expected = torch.zeros_like(x)
    for row, (shares, numbers) in enumerate(zip(routing.weights, routing.numbers.tolist(), strict=True)):
        for share, number in zip(shares, numbers, strict=True):
            gate, up = (weights.gate_up[number] @ x[row]).chunk(2)
            expected[row] += share * (weights.down[number] @ (F.silu(gate) * up))
    torch.testing.assert_close(run(weights, x, sizes), expected)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of PyTorch on an ARM CPU without units for bfloat16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    """Whether its expert gets 1 row or 150, with one thread or two."""
    weights, x = weights_of(dtype), rows_of(400, dtype)
    sizes = choose_tile_sizes(weights, dtype, is_cpu=True, is_invariant=True)
    assert sizes is not None and 16 in sizes
    logits = F.linear(x.float(), weights.router)
    together = run(weights, x, sizes, logits=logits, threads=2)
    for chosen in (slice(0, 1), slice(5, 8), slice(100, 231)):
        assert torch.equal(run(weights, x[chosen], sizes, logits=logits[chosen], threads=1), together[chosen])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.equal(run(weights, x[order], sizes, logits=logits[order], threads=1), together[order])


def test_other_devices_have_one_tile_for_an_expert_unless_bits_must_not_change() -> None:
    weights = weights_of(torch.float32)
    assert choose_tile_sizes(weights, torch.float32, is_cpu=False, is_invariant=False) is None
    assert choose_tile_sizes(weights, torch.float32, is_cpu=False, is_invariant=True) == (256,)


def test_narrow_weights_are_widened_where_activations_are_float32() -> None:
    weights, x = weights_of(torch.bfloat16), rows_of(20)
    wide = ExpertWeights(
        weights.router, *(tuple(each.float() for each in group) for group in (weights.gate_up, weights.down))
    )
    assert torch.equal(run(weights, x, (16,)), run(wide, x, (16,)))


def test_grouped_gemms_are_those_of_a_gpu() -> None:
    """Elsewhere each expert has its own GEMMs, and no CUDA graph holds them."""
    weights = weights_of(torch.bfloat16)
    stacked = replace(weights, gate_up=torch.stack(list(weights.gate_up)), down=torch.stack(list(weights.down)))
    assert not PLAIN.has_grouped_gemm(stacked) and not CpuElementwiseOps().has_grouped_gemm(weights)


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [8, 128])
def test_grouped_gemms(num_experts: int) -> None:
    """The outputs of a loop over experts; the same bits for a row whether its expert gets 1 row or all of them."""
    from prefixwise.backends.torch.cuda.fused_elementwise import FusedElementwiseOps

    torch.manual_seed(0)
    d, f, dtype = 1024, 384, torch.bfloat16
    model = replace(MODEL, model_size=d, mlp_size=f, experts=ExpertsConfig(num_experts, 4, norms_weights=True))
    weights = ExpertWeights(
        torch.randn(num_experts, d, device="cuda") / 30,
        torch.randn(num_experts, 2 * f, d, device="cuda", dtype=dtype) / 30,
        torch.randn(num_experts, d, f, device="cuda", dtype=dtype) / 30,
    )
    ops, x = FusedElementwiseOps(), torch.randn(3000, d, device="cuda", dtype=dtype)
    x[1000:] = x[1000]
    found = ops.run_experts(weights, x, model)
    assert model.experts is not None
    routing = route(x.double() @ weights.router.double().T, model.experts)
    runner = ExpertRunner(model, ops, Workers(None), None)
    expected = add_outputs(routing.weights, runner(weights, x, routing.numbers))
    assert (found.float() - expected.float()).norm() / expected.float().norm() < 5e-3
    for rows in (slice(0, 1), slice(0, 7), slice(5, 300), slice(900, 2900)):
        assert torch.equal(ops.run_experts(weights, x[rows], model), found[rows])
