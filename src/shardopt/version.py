"""The version, in the one place that everything may import."""

__version__ = "0.1.0"
