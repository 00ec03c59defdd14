"""`make bench-engine`: the verifier under load, without draft models on its cores."""
