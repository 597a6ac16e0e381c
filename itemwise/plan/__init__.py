"""Plan: what shall be computed? Splits, algorithm, batches. Pure, third on the data path, the last before the engine."""
