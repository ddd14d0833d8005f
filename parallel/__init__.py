"""A rank: loads its share of the model and runs the batched engine. Never imports `cluster`."""
