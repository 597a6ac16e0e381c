"""Comparison: two backends' matrices side by side, judged by the guardrail and the correctness gate."""
