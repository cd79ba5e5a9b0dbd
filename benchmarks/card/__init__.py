"""What the measurements on a card share: cases and their models, predicting, measuring, comparing, results."""
