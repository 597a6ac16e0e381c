"""Programs compiled for TPUs that are not there: described devices, the real compiler, and what it says of them."""
