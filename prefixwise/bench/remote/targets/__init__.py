"""Targets: this machine, one over ssh, a Cloud TPU VM, a Compute Engine GPU VM."""
