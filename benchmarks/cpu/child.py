"""A peer's process: answers each line on stdin by a line on stdout, all of them JSON, until stdin ends.

    python -m benchmarks.cpu.child ROLE-AS-JSON

    {"do": "load"}                nothing, once the model is loaded
    {"do": "prepare"}             what `Peer.prepare` returns
    {"do": "round", "seed": 3}    the fields of a `Round`

Whatever a library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.cpu.cases import Role
from benchmarks.cpu.peer import Peer


def _ours(role: Role) -> Peer:
    from benchmarks.cpu.ours import Ours

    return Ours(role)


def _ours_on_jax(role: Role) -> Peer:
    from benchmarks.cpu.ours import Ours

    return Ours(role, "jax")


def _prefix_cache(role: Role) -> Peer:
    from benchmarks.cpu.hugging_face import PrefixCache

    return PrefixCache(role)


def _full_sequences(role: Role) -> Peer:
    from benchmarks.cpu.hugging_face import FullSequences

    return FullSequences(role)


def _llama_cpp(role: Role) -> Peer:
    from benchmarks.cpu.llama import LlamaCpp

    return LlamaCpp(role)


def _products(role: Role) -> Peer:
    from benchmarks.cpu.torch_gemms import Products

    return Products(role)


def _xla_products(role: Role) -> Peer:
    from benchmarks.cpu.xla_gemms import XlaProducts

    return XlaProducts(role)


# None imports what another one needs.
PEERS: dict[str, Callable[[Role], Peer]] = {
    "ours": _ours,
    "hf-prefix": _prefix_cache,
    "hf-full": _full_sequences,
    "llama": _llama_cpp,
    "gemm": _products,
    "ours-jax": _ours_on_jax,
    "gemm-jax": _xla_products,
}


def answer(peer: Peer, question: dict[str, Any]) -> dict[str, Any]:
    """To one line."""
    if question["do"] == "load":
        return {}
    if question["do"] == "prepare":
        return peer.prepare()
    return asdict(peer.run(question["seed"]))


def main() -> None:
    told = json.loads(sys.argv[1])
    role = Role(**{**told, "geometry": tuple(told["geometry"])})
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        peer = PEERS[role.peer](role)
        for line in sys.stdin:
            print(json.dumps(answer(peer, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
