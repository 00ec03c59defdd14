"""The draft in PyTorch, of a Hugging Face directory, on any device that torch has. Needs the `edge-torch` extra; only
the registry and the export's check import it, when it is asked for."""
