"""Memory of a whole training run: many steps of different lengths, and what happens between them."""
