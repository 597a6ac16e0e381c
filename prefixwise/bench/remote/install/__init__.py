"""This prefixwise, put onto a target: a wheel built here, a venv there."""
