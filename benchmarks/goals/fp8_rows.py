"""What FP8 is measured at beside Qwen3-0.6B: the widths of larger models, and the memory that loading one takes.

A part of a backend's run with `Settings.quantization`, in its server's process. PyTorch on CUDA only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter

from benchmarks.contract import random_request
from benchmarks.goals.cases import WARM_UP_ROUNDS, Settings
from benchmarks.goals.targets import Measured
from benchmarks.random_checkpoint import QWEN3_06B, repeated_checkpoint
from prefixwise.backends.load import load_backend
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import BackendOptions
from prefixwise.launch.loading import warm_up
from prefixwise.models.config import ModelConfig

# Of Qwen3-4B and 8B, and what their other sizes are.
WIDTHS = {
    "4B": replace(QWEN3_06B, model_size=2560, mlp_size=9728, num_heads=32, num_kv_heads=8, num_layers=36),
    "8B": replace(
        QWEN3_06B,
        model_size=4096,
        mlp_size=12_288,
        num_heads=32,
        num_kv_heads=8,
        num_layers=36,
        tied_head=False,
    ),
}
_LAYERS, _VOCAB_SIZE = 12, 4096  # enough of a model for its widths: what is timed is layers
_POOL_BYTES = 2 << 30

Report = Callable[[str], None]


def width_rows(settings: Settings, report: Report) -> list[Measured]:
    """The contract workload, cold, in bfloat16 and in FP8, one after the other."""
    rows = []
    for name, shape in WIDTHS.items():
        model = replace(shape, num_layers=_LAYERS, vocab_size=_VOCAB_SIZE, tied_head=True)
        seconds = {}
        for quantization in (None, settings.quantization):
            report(f"widths of {name}, {quantization or 'bfloat16'}")
            seconds[quantization] = _seconds(model, quantization, settings)
        dense, fp8 = seconds[None], seconds[settings.quantization]
        title = f"{settings.scale.contract.title}, cold, {_LAYERS} layers of Qwen3-{name}'s widths, FP8 over bfloat16"
        note = f"{1000 * dense:.1f} ms and {1000 * fp8:.1f} ms"
        details = {"bfloat16_seconds": dense, "fp8_seconds": fp8}
        rows.append(Measured(f"width {name}", title, dense / fp8, "x", note=note, details=details))
    return rows


def _seconds(model: ModelConfig, quantization: str | None, settings: Settings) -> float:
    options = BackendOptions(
        settings.backend,
        quantization=quantization,
        prefix_attention_dtype="auto" if quantization is None else settings.prefix_attention_dtype,
        prefix_cache_bytes=_POOL_BYTES,
    )
    backend = load_backend(repeated_checkpoint(model), options)
    engine = ScoringEngine(EngineConfig("random"), Scheduler(backend), None)
    warm_up(engine)  # steps are cut by what they cost, and may have any size
    seconds = []
    for seed in range(WARM_UP_ROUNDS + settings.rounds):
        request = random_request(model, *settings.scale.contract.shape, seed=seed)
        begin = perf_counter()
        engine.score(request)
        seconds.append(perf_counter() - begin)
    engine.close()
    return median(seconds[WARM_UP_ROUNDS:])


def load_row(report: Report) -> Measured:
    """Bytes on the device at most, while the weights of Qwen3-8B's shape are loaded and quantised."""
    import torch

    from prefixwise.backends.torch.weights import load_weights

    report("loading an 8B shape")
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    begin = perf_counter()
    weights = load_weights(repeated_checkpoint(WIDTHS["8B"]), torch.bfloat16, device, is_fp8=True)
    torch.cuda.synchronize(device)
    seconds = perf_counter() - begin
    peak, size = torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    del weights
    torch.cuda.empty_cache()
    note = f"the weights are {size / 1e9:.2f} GB; {seconds:.1f} s"
    details = {"peak_bytes": peak, "weight_bytes": size}
    return Measured("load", "peak while Qwen3-8B's shape is loaded", peak / 1e9, "GB", note=note, details=details)
