"""Codecs of libraries that are not there unless they are used, one module for each family of optimizers."""
