"""What `bench ab` can compare: for each comparison the variants, as flags of a server and fields of a request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefixwise.contract.errors import PrefixwiseError

Comparison = Literal["mask", "algorithm", "backend", "chunk-size"]

VARIANT_NAMES: dict[Comparison, tuple[str, ...]] = {
    "mask": ("dense", "segment"),
    "algorithm": ("packed", "prefill_extend", "serial"),
    "backend": ("jax", "torch"),
    "chunk-size": ("8", "32", "128", "0"),  # 0: no bound
}
_SERVER_FLAGS: dict[Comparison, str] = {
    "mask": "--multi-item-mask-impl",
    "backend": "--backend",
    "chunk-size": "--multi-item-scoring-chunk-size",
}


class ComparisonError(PrefixwiseError):
    """There is no such variant, or too few of them; the message names those that there are."""


@dataclass(frozen=True)
class Variant:
    """One of those compared; those with the same flags share a server."""

    name: str
    server_flags: tuple[str, ...] = ()
    request_fields: dict[str, str] = field(default_factory=dict)


def variants_of(
    compare: Comparison, names: Sequence[str] | None, *, algorithm: str = "auto", mask: str = "auto"
) -> list[Variant]:
    """The first is what the others are compared with.

    `algorithm` and `mask` are for the comparisons of something else; where masks are compared, `mask` comes first,
    unless it is auto. Raises ComparisonError.
    """
    ordered = list(names or VARIANT_NAMES[compare])
    _check_names(compare, ordered)
    if compare == "mask" and names and mask not in ("auto", ordered[0]):
        raise ComparisonError(f"--mask is the baseline of masks: expected {ordered[0]}, the first variant, got {mask}")
    if compare == "mask" and not names:
        ordered.sort(key=lambda name: name != mask)
    if compare == "algorithm":
        return [Variant(name, ("--multi-item-mask-impl", mask), {"algorithm": name}) for name in ordered]
    shared = () if compare == "mask" else ("--multi-item-mask-impl", mask)
    return [Variant(name, (*shared, _SERVER_FLAGS[compare], name), {"algorithm": algorithm}) for name in ordered]


def _check_names(compare: Comparison, names: Sequence[str]) -> None:
    known = VARIANT_NAMES[compare]
    is_known = str.isdecimal if compare == "chunk-size" else known.__contains__
    if len(set(names)) < max(2, len(names)) or not all(map(is_known, names)):
        expected = "numbers like 8,32,0" if compare == "chunk-size" else f"among {','.join(known)}"
        raise ComparisonError(f"--variants must be two or more, each once, {expected}, got {','.join(names)}")


def round_orders(num_variants: int, rounds: int, seed: int) -> list[list[int]]:
    """Who runs when: by chance, and in as many rounds as there are variants each has every place once.

    So none always runs on a machine that another has heated up.
    """
    rng = random.Random(seed)
    orders: list[list[int]] = []
    while len(orders) < rounds:
        base = rng.sample(range(num_variants), num_variants)
        orders += [base[start:] + base[:start] for start in range(num_variants)]
    return orders[:rounds]
