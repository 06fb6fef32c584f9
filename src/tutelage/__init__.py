"""Tutelage trains language models from human and AI feedback; see README.md for the first two commands."""

__version__ = "0.1.0"
