"""Export of a Hugging Face directory to the INT4 ONNX form. Needs the `export` extra."""
