"""The parts of the soak: episodes, what ranks do in one, the oracle, faults, and proof that it can fail."""
