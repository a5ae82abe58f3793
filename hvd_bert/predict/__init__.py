"""The command `predict`: `answering.py` prints or writes answers; `answerer.py` has `QuestionAnswerer`."""
