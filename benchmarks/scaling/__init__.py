"""The parts of benchmarks/scale.py: what is measured, and models that are fitted to it."""
