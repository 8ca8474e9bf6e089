"""Presentations: what the inner optimizer sees while it steps."""
