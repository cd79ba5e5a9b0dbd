"""Benchmark of the accumulation check: does it catch losses that are not the mean of their micro-batches' losses?"""
