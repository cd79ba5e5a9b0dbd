"""A simulator of CUDA's caching allocator: which address and segment every block gets."""
