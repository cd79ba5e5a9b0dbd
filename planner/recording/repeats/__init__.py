"""Parts of a step that repeat: identical layers, the gradients of a second step, calls of the user's own step."""
