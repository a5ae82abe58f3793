"""Attention, linear layers and layer norm for CPUs, faster than torch's."""
