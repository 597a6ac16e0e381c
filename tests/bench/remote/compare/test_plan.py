from __future__ import annotations

import pytest

from prefixwise.bench.remote.compare.plan import MATRIX_STEPS, ComparePlan, MatrixStep, matrix_flags, server_flags


def test_the_flags_are_the_runbooks() -> None:
    plan = ComparePlan(server_flags=("--all",), jax_server_flags=("--one",), pytorch_server_flags=("--other",))
    common = "--multi-item-mask-impl auto --multi-item-segment-fallback-threshold 32768 --chunked-prefill-size -1"
    begin = "--model-path Qwen/Qwen3-0.6B --backend {} --dtype bfloat16 --multi-item-scoring-delimiter 151643 "
    flags = {step.name: " ".join(server_flags(plan, step, 151643)) for step in MATRIX_STEPS}
    jax, torch = begin.format("jax"), begin.format("torch")
    assert flags == {
        "jax_portable": f"{jax}--multi-item-scoring-chunk-size 500 {common} --disable-radix-cache --all --one",
        "jax_best_native": f"{jax}--multi-item-scoring-chunk-size 64 {common} --disable-radix-cache --all --one",
        "pytorch_portable": f"{torch}--multi-item-scoring-chunk-size 500 {common} --disable-radix-cache --all --other",
        "pytorch_best_native": f"{torch}--disable-radix-cache --all --other",
    }
    measured = " ".join(matrix_flags(plan, MatrixStep("jax", "best_native")))
    assert measured == (
        "--backend-name jax --evaluation-view best_native --client-chunk-sizes 1,2,4,8,16,32,64,128,256,500 "
        "--warmup-runs 1 --timed-runs 5 --timed-runs-confirm 7 --timeout-sec 180.0"
    )
    assert "--model-path" not in server_flags(ComparePlan(model="embedded"), MATRIX_STEPS[0], 0)


@pytest.mark.parametrize(
    ("num_items", "sizes"), [(500, (1, 2, 4, 8, 16, 32, 64, 128, 256, 500)), (10, (1, 2, 4, 8, 10)), (1, (1,))]
)
def test_chunk_sizes_reach_as_far_as_there_are_items(num_items: int, sizes: tuple[int, ...]) -> None:
    assert ComparePlan(num_items=num_items).sizes == sizes
