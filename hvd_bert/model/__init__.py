"""Encoders with a head: configuration, weights, attention, FLOP."""
