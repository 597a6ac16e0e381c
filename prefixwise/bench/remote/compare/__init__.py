"""The cross-backend comparison: two targets, four matrices, one report."""
