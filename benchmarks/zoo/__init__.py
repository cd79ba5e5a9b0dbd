"""Hundreds of small models of the libraries that people train: does a rehearsal give the bytes of a real step?"""
