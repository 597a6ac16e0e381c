"""Engine: when does it run, with whom? What is left of here is pure, what is right of it is a backend."""
