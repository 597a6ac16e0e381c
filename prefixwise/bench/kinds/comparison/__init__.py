"""The comparison of two backends: its model, rules, checks and report."""
