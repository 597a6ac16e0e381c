"""Named shapes of real requests, which tests and benchmarks share. Data only.

All are items over cached prefixes, with the heads of Qwen3-0.6B unless they say otherwise. Where a shape is too large
for a machine, `scaled` gives a smaller one of the same kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionShape:
    """Segments, the prefixes that they read, and the heads."""

    name: str
    prefix_lens: tuple[int, ...]
    segment_lens: tuple[int, ...]
    prefix_index: tuple[int, ...]  # per segment: which prefix it reads
    read_lens: tuple[int, ...]  # per segment: how many tokens of it
    num_heads: int = 16
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments; the prefixes are cached."""
        return sum(self.segment_lens)

    @property
    def flops(self) -> int:
        """Two GEMMs over all pairs of a query and a visible key; a multiplication and an addition are two FLOPs."""
        pairs = sum(
            length * read + length * (length + 1) // 2
            for length, read in zip(self.segment_lens, self.read_lens, strict=True)
        )
        return 4 * self.num_heads * self.head_size * pairs

    def scaled(self, fraction: float) -> AttentionShape:
        """This fraction of every prefix's tokens, of the segments that read it and of their tokens; at least one.

        Heads stay, and so does the number of tokens that a segment leaves unread at the end of its prefix.
        """
        prefix_lens = tuple(_part(length, fraction) for length in self.prefix_lens)
        chosen: list[int] = []
        for prefix in range(len(prefix_lens)):
            readers = [segment for segment, index in enumerate(self.prefix_index) if index == prefix]
            chosen += readers[: _part(len(readers), fraction)]
        chosen.sort()
        unread = [self.prefix_lens[self.prefix_index[segment]] - self.read_lens[segment] for segment in chosen]
        prefix_index = tuple(self.prefix_index[segment] for segment in chosen)
        return replace(
            self,
            prefix_lens=prefix_lens,
            segment_lens=tuple(_part(self.segment_lens[segment], fraction) for segment in chosen),
            prefix_index=prefix_index,
            read_lens=tuple(max(0, prefix_lens[p] - rest) for p, rest in zip(prefix_index, unread, strict=True)),
        )


def _part(count: int, fraction: float) -> int:
    return max(1, round(count * fraction))


def _requests(name: str, num_requests: int, prefix_len: int, num_items: int, item_len: int) -> AttentionShape:
    """Requests of one size, each with a prefix of its own."""
    num_segments = num_requests * num_items
    return AttentionShape(
        name,
        prefix_lens=(prefix_len,) * num_requests,
        segment_lens=(item_len,) * num_segments,
        prefix_index=tuple(request for request in range(num_requests) for _ in range(num_items)),
        read_lens=(prefix_len,) * num_segments,
    )


SHAPES: tuple[AttentionShape, ...] = (
    _requests("contract", 1, 2000, 500, 20),
    _requests("small_request", 1, 300, 10, 20),
    _requests("long_items", 1, 200, 100, 500),
    _requests("many_requests", 16, 300, 10, 20),
    _requests("one_item", 1, 2000, 1, 20),
    # An item without tokens computes the prefix's last token again, over those before it.
    AttentionShape("empty_item", (2000,), (1,), (0,), (1999,)),
    replace(_requests("gemma", 1, 2000, 500, 20), num_heads=8, num_kv_heads=1, head_size=256),  # Gemma 2B's heads
)
SHAPE_NAMED = {shape.name: shape for shape in SHAPES}
