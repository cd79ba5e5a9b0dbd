def estimated_bytes(convolution, capability):
    return 0
