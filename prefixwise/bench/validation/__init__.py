"""Validation: isolation, equivalence, parity and speed-ups of a server, and the gates that judge them."""
