"""The search space: the configurations and splits of the batch that a plan may choose from."""
