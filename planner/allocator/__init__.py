"""An exact simulator of PyTorch's CUDA caching allocator. It computes the address and the segment of every block."""
