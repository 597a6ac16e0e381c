"""The command line: one file per verb. Data goes to stdout, everything said about it to stderr."""
