"""Train with a plan on a CUDA card under a memory cap, and compare what was promised with what is measured.

Read `verification` first: it starts `worker` in fresh processes. `report` prints the result.
"""
