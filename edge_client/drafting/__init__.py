"""Draft strategies: the INT4 ONNX small model, its export and its sampling."""
