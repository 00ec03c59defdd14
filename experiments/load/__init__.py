"""`python -m outrider.experiments.load`: a load generator that replays recorded drafts."""
