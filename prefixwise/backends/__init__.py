"""Backends: the forward pass. JAX and PyTorch live under here and nowhere else."""
