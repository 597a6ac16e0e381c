"""The command line: one file per verb. Data goes to stdout, messages to stderr."""
