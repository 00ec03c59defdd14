"""The INT4 draft in onnxruntime: model, sequence, sampler and MC dropout."""
