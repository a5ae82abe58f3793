"""What works here, before hours are spent: `python -m hvd_bert.doctor` (docs/guides/preflight-check.md)."""
