"""The sample: a generator of passages and questions in SQuAD's JSON, a vocabulary, a small BERT."""
