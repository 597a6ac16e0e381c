"""The contract: what a legal request is, what a score is, and every error by name. Pure, first on the data path."""
