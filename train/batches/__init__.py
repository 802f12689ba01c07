"""Real batches: who is in each, and where the data is read from."""
