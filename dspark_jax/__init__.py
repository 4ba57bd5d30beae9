"""DSpark in JAX: lossless speculative decoding with parallel drafts and scheduled verification."""

__version__ = "0.1.0"
