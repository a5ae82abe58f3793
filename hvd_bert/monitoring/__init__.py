"""Resource usage of a run: GPUs, processes, profiles."""

# The phases of a step in the order of the step-time summary, described in docs/reference/output-files.md.
PHASES = ("data", "compute", "exposed_comm", "optimizer", "checkpoint", "other")
