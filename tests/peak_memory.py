"""How much memory a piece of work takes at its peak: run in a process of its own, file pages not counted.

    python -m tests.peak_memory load FOLDER_OR_EMBEDDED DTYPE             growth while PyTorch loads a model
    python -m tests.peak_memory load_jax FOLDER_OR_EMBEDDED DTYPE TP WAY  growth while JAX does, on TP devices
    python -m tests.peak_memory logprobs FOLDER NUM_PROMPTS               growth while NUM_PROMPTS x 500 tokens are read
    python -m tests.peak_memory score FOLDER ALGORITHM MASK NUM_ITEMS     growth while 200 + NUM_ITEMS x 99 are scored

Prints the growth in bytes above the level before the work began, imports done.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def anonymous_bytes() -> int:
    """Resident memory that no file backs, so that the pages of a mapped checkpoint are left out."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report RssAnon")


@contextmanager
def watch_peak() -> Iterator[list[int]]:
    """Samples every few milliseconds; the list's only entry is the growth so far."""
    growth, stop = [0], threading.Event()
    base = anonymous_bytes()

    def sample() -> None:
        while not stop.wait(0.002):
            growth[0] = max(growth[0], anonymous_bytes() - base)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield growth
    finally:
        growth[0] = max(growth[0], anonymous_bytes() - base)
        stop.set()
        thread.join()


def growth_of(*arguments: str) -> int:
    """Run this module in a process of its own and read its answer."""
    command = [sys.executable, "-m", "tests.peak_memory", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def _load(model: str, dtype: str) -> int:
    import gguf.quants  # noqa: F401  # imports belong to the baseline

    from prefixwise.backends.torch.backend import TorchBackend
    from prefixwise.models.sources import open_checkpoint

    with watch_peak() as growth:
        backend = TorchBackend(open_checkpoint(None if model == "embedded" else model), dtype=dtype, device="cpu")
    assert backend.config.num_layers
    return growth[0]


def _load_jax(model: str, dtype: str, tp_size: str, way: str) -> int:
    """`way`: `host`, into the process's own memory, or `donated`, piece by piece, as on an accelerator."""
    import gguf.quants  # noqa: F401  # imports belong to the baseline
    import jax

    from prefixwise.backends.jax.mesh import make_mesh
    from prefixwise.backends.jax.placement import HeadPlacement
    from prefixwise.backends.jax.weights import load_weights
    from prefixwise.models.sources import open_checkpoint

    checkpoint = open_checkpoint(None if model == "embedded" else model)
    placement = HeadPlacement.plan(checkpoint.config.num_heads, checkpoint.config.num_kv_heads, int(tp_size))
    mesh = make_mesh(jax.devices("cpu"), 1, int(tp_size))
    jax.jit(lambda x: x + 1)(1.0).block_until_ready()  # the compiler belongs to the baseline too
    with watch_peak() as growth:
        weights = load_weights(checkpoint, dtype, mesh, placement, is_host_memory=way == "host")
        for array in jax.tree.leaves(weights):
            array.block_until_ready()
    return growth[0]


def _score(folder: str, algorithm: Any, mask: str, num_items: str) -> int:
    from prefixwise import Scorer
    from prefixwise.forward.backend import STEP_SECONDS

    STEP_SECONDS["cpu"] = None  # one step, however long it takes
    budget = 200 + 99 * int(num_items)
    scorer = Scorer(folder, device="cpu", dtype="float32", mask=mask, chunk_size=0, token_budget=budget)  # type: ignore[arg-type]
    scorer.score([1], [[2]], label_token_ids=[3])  # allocator and thread pools belong to the baseline
    items = [[(i + j) % 500 for j in range(99)] for i in range(int(num_items))]
    with watch_peak() as growth:
        result = scorer.score(list(range(200)), items, label_token_ids=[3], algorithm=algorithm, return_debug=True)
    assert len((result.debug or {})["batches"]) == 1  # type: ignore[arg-type]
    return growth[0]


def _logprobs(folder: str, num_prompts: str) -> int:
    import numpy as np

    from prefixwise import Scorer
    from prefixwise.engine.likelihoods import Likelihoods
    from prefixwise.plan.likelihoods import TokenSequence

    with Scorer(folder, device="cpu", dtype="float32", prefix_cache_bytes=1 << 24) as scorer:
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, scorer.engine.backend.config.vocab_size, (int(num_prompts) + 8, 500), np.int32)
        sequences = [TokenSequence(prompt, 1) for prompt in prompts]
        likelihoods = Likelihoods(scorer.engine)
        likelihoods.read(sequences[:8])  # allocator and thread pools belong to the baseline
        with watch_peak() as growth:
            likelihoods.read(sequences[8:])
    return growth[0]


if __name__ == "__main__":
    work = {"load": _load, "load_jax": _load_jax, "score": _score, "logprobs": _logprobs}[sys.argv[1]]
    print(work(*sys.argv[2:]))  # type: ignore[operator]  # they take other numbers of arguments
