"""The training step to plan (model, batch, loss, optimizer) and the card to plan it for."""
