"""Exports a model, new or trained by a run, to ONNX files for training on a device and for serving."""
