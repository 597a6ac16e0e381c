"""Checks: what must hold between the fields of an artifact, beyond the types of each."""
