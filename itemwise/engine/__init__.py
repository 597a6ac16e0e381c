"""Engine: when does it run, with whom? Everything left of here is pure; everything right of it is a backend."""
