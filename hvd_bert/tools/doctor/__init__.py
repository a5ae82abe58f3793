"""Preflight check: `hvd-bert doctor` (docs/guides/preflight-check.md)."""
