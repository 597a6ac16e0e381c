"""`prefixwise ops`: benchmark runs on any machine one can reach."""
