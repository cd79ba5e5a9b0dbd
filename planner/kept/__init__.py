"""Recordings that are kept in the user's cache folder, so that the next question about a model is answered sooner."""
