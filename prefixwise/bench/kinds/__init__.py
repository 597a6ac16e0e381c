"""Kinds of artifacts: one file each, with its model, its check and its report; `registry.py` has a row for each."""
