"""Prompts: which tokens does each item see? From a legal request to token ids, purely; second on the path."""
