"""The sample that ships with the project: invented passages and questions in SQuAD's JSON, a vocabulary, a small BERT."""
