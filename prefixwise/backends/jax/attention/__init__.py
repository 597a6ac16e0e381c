"""Attention in JAX: `api.py` is the door, one file per implementation behind it."""
