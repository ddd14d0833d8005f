"""The batched engine of a rank: policy (scheduler, prefix), tensors (kv, sampling, executor) and the one loop."""
