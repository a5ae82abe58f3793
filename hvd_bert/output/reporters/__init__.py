"""Where a run's metrics, settings and sample answers are shown besides metrics.jsonl (`--report_to`)."""
