"""How well accumulation is guarded against losses whose parts do not add up."""
