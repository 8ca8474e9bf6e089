"""The catalogue of optimizers: how each is made and called, run unsharded, wrapped and bare, and what came of it."""
