"""Monitoring of a run: GPU and process usage, the GPUs' peak FLOP/s, timelines and profiles."""

# The phases of a step -> their names in the step-time summary, in its order. See docs/reference/output-files.md.
PHASES = {
    "data": "waiting for data",
    "compute": "forward and backward",
    "exposed_comm": "exposed communication",
    "optimizer": "clipping and optimizer",
    "checkpoint": "checkpoint pause",
    "other": "other",
}
