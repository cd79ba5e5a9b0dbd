"""An exact simulator of CUDA's caching allocator: the address and the segment of every block."""
