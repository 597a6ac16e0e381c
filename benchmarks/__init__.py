"""What we measure: each script says what in its docstring, and its last output line is JSON."""
