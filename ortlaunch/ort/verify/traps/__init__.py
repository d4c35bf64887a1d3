"""The traps of ONNX Runtime that the check at a run's start looks for.

Each module registers one under its own name, which is also what ``backend.allow`` takes.
"""
