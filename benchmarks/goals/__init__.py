"""All goals of GPU speed, measured through the engine and the server.

Measured, for each backend in a server process of its own, with random weights of Qwen3-0.6B's exact shape in bfloat16:

    cold       2000 + 500 x 20 tokens through `ScoringEngine.score`, every query new: median of --rounds after warm-up.
               Always measured, as others are held to it; its fill is tokens computed / tokens with padding
    cached     the same request again and again, its prefix cached
    many       2000 + 10,000 x 20 in one request; and peak device memory at 500, 2,000 and 10,000 items
    long       200 + 100 x 500
    invariant  cold with batch_invariant against cold without it
    http       cold through `POST /v1/score`, one client in another process: items / median seconds
    http8      the same with 8 requests in flight: all items / all seconds
    small      300 + 10 x 20 through HTTP, one at a time: median milliseconds
    poisson    300 + 10 x 20, open loop, every query new: the highest rate whose p99 is within 50 ms, by the search of
               `prefixwise bench load`; its fill is that of a run at this rate
    poisson20  the same within 20 ms
    sglang     120 + 10 x 180, the workload of SGLang's own benchmark, within 500 ms: items per second
    beside_many, beside_long
               300 + 10 x 20 through HTTP, one at a time, while requests of 2000 + 10,000 x 20 (of 200 + 16 x 8,000) run
               one after the other: p50 and p99, and the large ones' rate as a share of their rate alone in this run
    fp8_cold, fp8_cached, fp8_http8
               cold, cached and http8 of PyTorch with quantization="fp8", in a server process of its own
    fp8_widths cold, 12 layers of Qwen3-4B's and 8B's widths, FP8 over bfloat16
    fp8_load   peak device memory while Qwen3-8B's shape is loaded in FP8

With `--serve`, or flags after `--`, HTTP cases ask `prefixwise serve` with these flags (`-- --http-workers 4`) on a
checkpoint with random weights. Nothing is measured inside of it, so there is no `cold` and no rate of GEMMs.

TFLOP/s are by the floor's count (`benchmarks.contract.floor_flops`), beside the rate that the model's own matrix
products reach in the same process. `cold` has a goal for each backend, `cached` for JAX; fill and `many` are held to
each backend, everything else to the better one, and the other's row is for information. The last line is JSON; the exit
status is 1 where something could not be measured, not where a goal is missed.

    python -m benchmarks.goals [--backend both] [--only cold --only http] [--rounds 10] [--output FILE] [--tiny]
    python -m benchmarks.goals --backend torch --only poisson --model-folder /tmp/random -- --http-workers 4
"""
