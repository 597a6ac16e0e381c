"""The PyTorch backend: CUDA and CPU. The only folder that imports torch."""
