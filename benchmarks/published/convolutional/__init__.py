"""Published memory of training convolutional networks, and the rehearsals that predict it."""
