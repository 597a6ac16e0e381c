"""Programs for TPUs that are not attached: compiled ahead of time, with their memory and cost."""
