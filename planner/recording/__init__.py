"""Records a running training step as a `StepGraph`."""
