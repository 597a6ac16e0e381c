"""Attention in JAX: `api.py` is the interface, with one file per implementation behind it."""
