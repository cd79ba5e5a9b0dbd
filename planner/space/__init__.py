"""The search space: which configurations a plan may choose from."""
