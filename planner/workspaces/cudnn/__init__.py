"""Finds the workspaces that cuDNN takes for convolutions, without a GPU.

From PyTorch's rules follows what it asks of cuDNN for a convolution (`dispatch`). cuDNN's own heuristics know the
workspace. They answer on a machine without a GPU (`library`, asked by `asking` in a process of its own); tables of
their answers come with the planner (`tables`); and for the rest there is a formula (`fallback`). `sources` takes the
best of these.
"""
