"""Preflight check: `python -m hvd_bert.doctor` (docs/guides/preflight-check.md)."""
