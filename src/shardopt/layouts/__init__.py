"""Layouts: where a state entry sits in its parameter's global coordinates."""
