"""diversed: speculative decoding faster than lossless, at a price you can read."""

__version__ = "0.1.0"
