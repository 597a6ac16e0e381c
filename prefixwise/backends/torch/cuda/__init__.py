"""The fast path on CUDA in half precision: prefixes in pages, attention in Triton, one CUDA graph per program."""
