"""ortlaunch: a launcher for distributed PyTorch training with ORTModule, DeepSpeed, DDP and MLflow."""

from ortlaunch.models.unwrapped import unwrapped

__all__ = ["unwrapped"]
__version__ = "0.1.0"
