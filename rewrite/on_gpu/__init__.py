"""Train by a plan on a CUDA card under a memory cap, and compare promised with measured."""
