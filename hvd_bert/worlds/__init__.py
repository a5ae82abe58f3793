"""Worlds of several ranks, and how a process joins the one that its launcher made."""
