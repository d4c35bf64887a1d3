"""ortlaunch: a launcher for distributed PyTorch training with ORTModule, DeepSpeed, DDP and MLflow."""

__version__ = "0.1.0"
