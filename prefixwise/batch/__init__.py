"""Scores files of rows into files with bounded memory: what `prefixwise batch` runs, on one machine or many."""
