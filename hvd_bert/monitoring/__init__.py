"""Resource usage of a run: GPUs and their peaks, processes, profiles."""

# The phases of a step in the order of the step-time summary, described in docs/reference/output-files.md.
PHASES = {
    "data": "waiting for data",
    "compute": "forward and backward",
    "exposed_comm": "exposed communication",
    "optimizer": "clipping and optimizer",
    "checkpoint": "checkpoint pause",
    "other": "other",
}
