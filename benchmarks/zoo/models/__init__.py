"""The models of the zoo, by library."""
