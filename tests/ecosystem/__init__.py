"""The wrapper inside of other people's training loops."""
