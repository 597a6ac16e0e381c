"""The fast path on CUDA in half precision: a paged KV cache, attention in Triton, one CUDA graph per program."""
