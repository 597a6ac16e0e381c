"""An attention case through the paged kernels: prefixes in pages, everything around them poisoned with NaN."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from prefixwise.backends.torch.cuda.attention import PagedAttention, PrefixTuning, Rows
from prefixwise.backends.torch.cuda.inputs import (
    ForwardInputs,
    ProgramSpec,
    capacities,
    flat,
    host_inputs,
    packing,
    unpack,
)
from prefixwise.backends.torch.cuda.kv_cache import KeySource
from prefixwise.backends.torch.fp8 import FP8, dequantise_heads, quantise_heads, round_to_fp8
from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.batch import ForwardBatch
from prefixwise.forward.kv_pages import batch_tiles, page_table
from prefixwise.forward.tiles import KEY_TILE
from tests.attention_cases import PLAIN, AttentionInputs, Floats, Implementation, Scoring

MAX_BLOCKS = 64


def paged(
    dtype: torch.dtype,
    device: str,
    prefix: PrefixTuning | None = None,
    scoring: Scoring = PLAIN,
    cache: Literal["exact", "rounded", "fp8", "rounded_keys", "fp8_keys"] = "exact",
    num_processors: int | None = None,
    *,
    has_codes: bool = False,
) -> Implementation:
    """`cache`: what pages hold. `rounded` is `dtype` with the numbers that codes of FP8 stand for; with `rounded_keys`
    and `fp8_keys` prefix attention's queries are rounded as keys are. `num_processors`:
    as many programs; None: for all of the GPU's multiprocessors. `has_codes`: the result in FP8. Of a batch with scored
    tokens it returns [R, N, H] of these, as the last layer computes them."""

    def run(batch: ForwardBatch, inputs: AttentionInputs) -> Floats:
        (num_tokens, num_heads, head_size), num_kv_heads = inputs.q.shape, inputs.k.shape[1]
        attention = PagedAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            device=torch.device(device),
            prefix=prefix,
            scale=scoring.scale,
            softcap=scoring.softcap,
        )
        if num_processors is not None:
            attention._num_multiprocessors = num_processors

        def move(values: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values).to(device, dtype)

        qkv = move(np.concatenate([inputs.q, inputs.k, inputs.v], 1))
        reads_cache = any(prefix.blocks for prefix in batch.prefixes)
        num_scored = len(batch.score_tokens)
        spec = ProgramSpec(num_tokens, "cache" if reads_cache else "batch", scores=num_scored > 0)
        if reads_cache:
            keys, values, lists = _cache(batch, inputs)
            source = _source(move(keys), move(values), cache)
        else:
            lists = batch_tiles(batch)
            source = KeySource(qkv, qkv, num_heads, num_heads + num_kv_heads)
        arrays = _on_device(attention, spec, batch, lists, device)
        out = torch.zeros(num_tokens, num_heads, head_size, dtype=dtype, device=device)
        lse = torch.full((num_tokens, num_heads), float("nan"), device=device)
        codes = torch.full_like(out, float("nan")).to(FP8) if has_codes else None
        rows = Rows(qkv, out, lse, arrays.positions, codes)
        attention.attend_self(rows, arrays.tiles, scoring.window)
        if cache in ("rounded_keys", "fp8_keys"):
            queries = round_to_fp8(qkv[:, :num_heads]).contiguous()
            rows = rows._replace(queries=queries if cache == "fp8_keys" else queries.to(dtype))
        if num_scored:
            rows, before = _no_rows(rows), rows
            attention.take_scored(before, arrays.score_tokens, arrays.tiles, rows)
        attention.attend_prefix(rows, source, arrays.tiles, scoring.window, is_scored=num_scored > 0)
        found: Floats = (rows.out if codes is None else codes).float().cpu().numpy()
        return found[:num_scored] if num_scored else found

    return run


def _no_rows(rows: Rows) -> Rows:
    """Memory for the scored tokens."""
    _, num_heads, head_size = rows.out.shape
    queries = torch.full((len(rows.queries), num_heads, head_size), float("nan")).to(rows.queries)
    out, lse = torch.full_like(queries, float("nan"), dtype=rows.out.dtype), torch.full_like(rows.lse, float("nan"))
    return Rows(queries, out, lse, torch.zeros_like(rows.positions))


def _source(keys: torch.Tensor, values: torch.Tensor, cache: str) -> KeySource:
    if cache == "exact":
        return KeySource(keys, values)
    if cache in ("rounded_keys", "fp8_keys"):
        codes = round_to_fp8(keys)
        return KeySource(codes if cache == "fp8_keys" else codes.to(keys.dtype), values)
    (key_codes, key_scales), (value_codes, value_scales) = quantise_heads(keys), quantise_heads(values)
    if cache == "rounded":
        rounded = (dequantise_heads(key_codes, key_scales, keys.dtype), value_codes, value_scales)
        return KeySource(rounded[0], dequantise_heads(*rounded[1:], values.dtype))
    for codes, scales in ((key_codes, key_scales), (value_codes, value_scales)):
        scales[codes.float().isnan().any(-1)] = 255  # infinite
    return KeySource(
        key_codes, value_codes, key_scales=key_scales.T.contiguous(), value_scales=value_scales.T.contiguous()
    )


def _on_device(
    attention: PagedAttention, spec: ProgramSpec, batch: ForwardBatch, lists: list[Int64Array], device: str
) -> ForwardInputs[torch.Tensor]:
    lens = capacities(spec, attention.tile_sizes, MAX_BLOCKS)
    layout = packing(lens)
    packed = np.full(layout.size, 1 << 20, np.int32)  # what lies behind is another forward's
    layout.pack(flat(host_inputs(batch, spec, attention.tile_sizes, lists, {})), packed)
    return unpack(layout, torch.from_numpy(packed).to(device))


def _cache(batch: ForwardBatch, inputs: AttentionInputs) -> tuple[Floats, Floats, list[Int64Array]]:
    """Keys, values and page table: cached prefixes and those of the batch in pages that are not in order."""
    pages = iter(np.random.default_rng(1).permutation(MAX_BLOCKS))
    shape = (MAX_BLOCKS * KEY_TILE, *inputs.k.shape[1:])
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)

    def write(new_keys: Floats, new_values: Floats) -> int:
        address = int(next(pages)) * KEY_TILE
        keys[address : address + len(new_keys)] = new_keys
        values[address : address + len(new_values)] = new_values
        return address

    addresses: dict[int, int] = {}  # by the block's identity
    for prefix, cached in zip(batch.prefixes, inputs.cached, strict=True):
        for number, block in enumerate(prefix.blocks):
            rows = slice(number * KEY_TILE, number * KEY_TILE + block.num_tokens)
            addresses[id(block)] = write(cached[0][rows], cached[1][rows])
    new_pages = {}
    for segment, (start, stop) in enumerate(zip(batch.segment_starts[:-1], batch.segment_starts[1:], strict=True)):
        if stop - start <= KEY_TILE:
            new_pages[segment] = write(inputs.k[start:stop], inputs.v[start:stop])
    return keys, values, page_table(batch, new_pages, lambda block: addresses[id(block)])
