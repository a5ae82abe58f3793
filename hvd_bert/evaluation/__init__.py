"""Evaluation: computes logits, answers, exact match and F1."""
