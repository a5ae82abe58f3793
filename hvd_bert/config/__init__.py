"""Settings: the dataclasses, the parser of the command line, and the presets."""
