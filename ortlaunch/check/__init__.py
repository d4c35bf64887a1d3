"""`ortlaunch check`: compares a model under ONNX Runtime with the same model in PyTorch.

`process` runs all parts of the check. Every finding comes from a comparison with PyTorch, never from a class name.
"""
