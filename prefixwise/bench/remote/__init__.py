"""Ops: benchmark runs on any machine one can reach: one logic, and what differs is how a command gets there."""
