"""The data pipeline: from SQuAD's text to the tensors of a training step."""
