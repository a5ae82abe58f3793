"""Attention, linear layers and layer norm that are faster on the CPU than torch's."""
