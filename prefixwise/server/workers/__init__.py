"""HTTP workers: N processes that speak HTTP, one that has the scheduler and the device, and a supervisor over them."""
