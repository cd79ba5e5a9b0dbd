"""The judge, where something else runs the loop or the model is wrapped: processes, trainers, 8-bit state."""
