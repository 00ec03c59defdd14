"""A pair of models without weights: a given acceptance, given times, over the real engine and the real wire.

So a 70B on an H100 can be planned and swept on a laptop. Nothing it writes means anything, everything made
with it is labelled synthetic.
"""
