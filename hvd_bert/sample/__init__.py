"""The sample that ships: invented passages and questions in SQuAD's JSON, a vocabulary, a small BERT."""
