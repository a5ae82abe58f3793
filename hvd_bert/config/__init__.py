"""Settings: the dataclasses, the command line that fills them, the presets."""
