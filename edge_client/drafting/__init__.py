"""Draft strategies: the INT4 ONNX model, its export, prompt lookup, and the pool of sequences. Imports
tokenization."""
