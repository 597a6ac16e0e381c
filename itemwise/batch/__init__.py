"""Many rows from files to scores in files, with bounded memory: what `itemwise batch` runs, on one machine or many."""
