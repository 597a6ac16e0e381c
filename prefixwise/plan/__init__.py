"""Plan: what shall be computed? Splits, algorithm, batches. Pure, the last room before the engine."""
