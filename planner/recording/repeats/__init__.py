"""Parts of a rehearsal that repeat: identical layers, the gradients of a second step, calls of the user's own step."""
