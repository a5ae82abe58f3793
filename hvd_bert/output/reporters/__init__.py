"""Reporters (`--report_to`): libraries that show a run's metrics, settings and sample answers."""
