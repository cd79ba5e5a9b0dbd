"""A device for PyTorch that behaves like a CUDA card, but computes nothing and stores nothing."""
