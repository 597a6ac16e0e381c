"""Models: one description per checkpoint, read once, used by every backend. No device is touched here."""
