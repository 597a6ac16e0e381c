"""One use of every engine option that `score` and `rerank` share, as arguments and as what they mean."""

from __future__ import annotations

from prefixwise.launch.options import EngineOptions

ENGINE_ARGS = (
    "--model m --backend jax --device d --dtype float16 --tp-size 2 --dp-size 3 --batch-invariant --quantization fp8 "
    "--kv-cache-dtype fp8 --prefix-attention-dtype fp8 --attention a "
    "--chunk-size 0 --mask dense --segment-fallback-threshold 4 --token-budget 5 "
    "--warmup fast --compilation-cache-dir c --no-weight-cache --prefix-cache-bytes 7"
)
ENGINE_OPTIONS = EngineOptions(
    model="m",
    backend="jax",
    device="d",
    dtype="float16",
    tp_size=2,
    dp_size=3,
    batch_invariant=True,
    quantization="fp8",
    kv_cache_dtype="fp8",
    prefix_attention_dtype="fp8",
    attention="a",
    chunk_size=0,
    mask="dense",
    segment_fallback_threshold=4,
    token_budget=5,
    warmup="fast",
    compilation_cache_dir="c",
    weight_cache=False,
    prefix_cache_bytes=7,
)
