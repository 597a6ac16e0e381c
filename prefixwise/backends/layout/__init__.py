"""How a batch is laid out for attention kernels: numpy only, shared by the backends."""
