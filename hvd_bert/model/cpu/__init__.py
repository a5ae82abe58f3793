"""Layers and matrix products that are faster on the CPU than PyTorch's own."""
