"""Evaluation: from a model's logits to answers, exact match and F1."""
