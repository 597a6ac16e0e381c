"""Targets: this machine, a machine over ssh, a Cloud TPU VM, a Compute Engine GPU VM."""
