"""The self-check: every program of the harness on servers of our own, with a verdict."""
