"""From SQuAD's text to the tensors of a training step, in the order of the modules' imports."""
