"""A feed-forward network with one hidden layer."""

from __future__ import annotations

from torch import Tensor, nn


class FeedForward(nn.Module):
    """A linear layer, a ReLU and a second linear layer.

    Args:
        input_dim: the number of features of one flattened sample.
        hidden_dim: the number of units of the hidden layer.
        output_dim: the number of classes.
    """

    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_dim, hidden_dim)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(hidden_dim, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape [B, output_dim] for samples of shape [B, ...] with input_dim values each."""
        return self.fc2(self.relu(self.fc1(x.flatten(1))))
