"""A device that behaves like CUDA and stores nothing."""
