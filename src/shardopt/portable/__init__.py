"""Portable state: what goes into a checkpoint, as exact values, bytes and one manifest."""
