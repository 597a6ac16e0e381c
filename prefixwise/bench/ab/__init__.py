"""A/B: variants on one machine, interleaved, with ratios and their intervals."""
