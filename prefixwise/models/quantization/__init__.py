"""Quantised checkpoints in Hugging Face's layout: what their configs say, and how their tensors become weights."""
