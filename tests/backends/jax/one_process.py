"""One of several processes that load a model together.

    python -m tests.backends.jax.one_process FOLDER TP_SIZE OUT [COORDINATOR NUM_PROCESSES PROCESS_ID]

Gathers all weights over the processes and writes them to OUT, so that a test can look at what they hold together.
Without the last three the environment says who takes part.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from prefixwise.backends.jax.mesh import P, make_mesh, put_replicated, start_distributed
from prefixwise.backends.jax.placement import HeadPlacement
from prefixwise.backends.jax.weights import load_weights
from prefixwise.models.sources import open_checkpoint


def main(folder: str, tp_size: str, out: str, *processes: str) -> None:
    if processes:
        address, num_processes, process_id = processes
        start_distributed(address, int(num_processes), int(process_id))
    else:
        start_distributed()
    start_distributed()  # the second time it has nothing to do
    checkpoint = open_checkpoint(folder)
    mesh = make_mesh(jax.devices(), 1, int(tp_size))
    placement = HeadPlacement.plan(checkpoint.config.num_heads, checkpoint.config.num_kv_heads, int(tp_size))
    gathered = {}
    for way in ("host", "donated"):
        weights = load_weights(checkpoint, "float32", mesh, placement, is_host_memory=way == "host")
        assert not weights.embedding.is_fully_addressable
        gather = jax.jit(lambda weights: weights, out_shardings=NamedSharding(mesh, P()))
        for path, array in jax.tree.leaves_with_path(gather(weights)):
            gathered[way + jax.tree_util.keystr(path)] = np.asarray(array)
    gathered["replicated"] = np.asarray(put_replicated(mesh, np.arange(5)))
    Path(out).write_bytes(pickle.dumps(gathered))


if __name__ == "__main__":
    main(*sys.argv[1:])
