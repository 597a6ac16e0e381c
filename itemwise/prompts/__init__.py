"""Prompts: which tokens does each item see? From a legal request to token ids. Pure, second on the data path."""
