"""Planning for a whole training run: batches of many lengths, and what happens between the steps."""
