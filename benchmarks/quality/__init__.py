"""Real tasks on the embedded model: `accuracy` against transformers, `harness` with lm-evaluation-harness.

The data comes with packages of PyPI, and goes to the user's cache folder, never into the repository (`data.py`).
"""
