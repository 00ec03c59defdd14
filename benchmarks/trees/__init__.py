"""`make bench-trees`: what trees bring, measured."""
