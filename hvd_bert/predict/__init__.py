"""The command `predict`. answering.py answers questions, rows.py predicts, answerer.py has `QuestionAnswerer`."""
