"""The JAX backend: TPU, CUDA and CPU, one device or a mesh of them. The only folder that imports jax."""
