"""The parts of the soak: episodes drawn from a seed, what ranks do in one, the oracle, faults, and proof that it can fail."""
