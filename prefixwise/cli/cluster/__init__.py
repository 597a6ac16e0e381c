"""`prefixwise cluster`: a Ray Serve application from the command line, or as a configuration file."""
