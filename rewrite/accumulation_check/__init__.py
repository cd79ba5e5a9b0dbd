"""Check that the gradient of a batch equals that of its micro-batches."""
