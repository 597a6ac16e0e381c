"""The cross-backend runbook from end to end: two targets, four matrices, one report."""
