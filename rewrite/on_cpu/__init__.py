"""Train with a plan on the CPU, where there is no CUDA card, and compare with a rehearsal of the same step.

Read `verification` first: it starts `worker` in a fresh process, which uses `prediction` and `allocations`. `report`
prints the result.
"""
