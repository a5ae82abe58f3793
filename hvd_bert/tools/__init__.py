"""Programs that look at runs from outside. Nothing outside this folder imports it."""
