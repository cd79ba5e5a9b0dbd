"""Answers a rehearsed step that asks for values of tensors: known values, assumptions and refusals."""
