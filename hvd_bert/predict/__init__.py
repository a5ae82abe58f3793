"""The command `predict`: `__main__.py` reads the command line, `answerer.py` has `QuestionAnswerer`, `answering.py`
prints answers, `file_answers.py` and `unfinished.py` write the answers to a file of questions."""
