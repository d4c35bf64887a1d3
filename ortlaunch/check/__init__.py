"""Whether a model computes under ONNX Runtime what it computes in PyTorch.

``ortlaunch check`` looks at everything (`process`), a run at its start at what would go wrong in silence (`quick`).
Everything is found by comparison with PyTorch, never by the name of a class.
"""
