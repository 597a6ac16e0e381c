"""Rerank dialects: what each client's JSON means, and how it reads its answers. One engine is behind all of them."""
