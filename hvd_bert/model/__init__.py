"""Encoders with a head: configuration, weights, attention and FLOP."""
