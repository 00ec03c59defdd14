"""`python -m outrider.experiments.load.__main__`: a load generator that replays recorded drafts."""
