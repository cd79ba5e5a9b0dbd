"""From a running training step to a `StepGraph`."""
