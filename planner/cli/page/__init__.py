"""The HTML report: one file that shows the memory of a training step over time, and the plan that changes it."""
