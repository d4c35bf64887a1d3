"""From a model, fresh or trained by a run, to ONNX files: to train on a device, and to serve."""
