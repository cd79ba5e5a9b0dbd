"""Compares trainings with plain loops under DistributedDataParallel, FSDP2, trainers and 8-bit optimizer state."""
