"""Small nets on images of 8 by 8 digits, each with one thing that ORTModule once computed wrongly or refused."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRENGTH = float(os.environ.get("STRENGTH", "1"))


class Net(nn.Module):
    """Two layers; what is between them is the case."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.last = nn.Linear(32, 10)

    def forward(self, pixel_values: Tensor) -> Tensor | dict[str, Tensor]:
        return self.last(self.between(self.first(pixel_values.flatten(1))))

    def between(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden)


class SamePadding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding="same")
        self.second = nn.Conv2d(8, 4, 4, padding="same")
        self.last = nn.Linear(256, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(pixel_values)))).flatten(1))


def enclosed(strength: float) -> nn.Module:
    class Enclosed(Net):
        def between(self, hidden: Tensor) -> Tensor:
            return torch.tanh(hidden * strength)

    return Enclosed()


class GlobalValue(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden * STRENGTH)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class IdentityFunction(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return torch.tanh(_Identity.apply(hidden))


class AddedActivation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def between(self, hidden: Tensor) -> Tensor:
        return torch.addmm(torch.tanh(hidden), torch.tanh(hidden), self.weight)


class AddedMatrix(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)
        self.more = nn.Parameter(torch.zeros(1, 32))

    def between(self, hidden: Tensor) -> Tensor:
        return torch.addmm(self.more, torch.tanh(hidden), self.weight)


class HookOfATensor(Net):
    def between(self, hidden: Tensor) -> Tensor:
        hidden = torch.tanh(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 3)
        return hidden


class WarmsUp(Net):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.done = steps, 0

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None):  # type: ignore[override]
        logits = super().forward(pixel_values)
        if labels is None:
            return logits
        self.done += self.training
        return F.cross_entropy(logits, labels) * min(1.0, self.done / self.steps), logits


class MaxNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 32, max_norm=0.5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.last(self.table((pixel_values.flatten(1) * 16).long().clamp(0, 16)).mean(1) * 8)


class ClampedData(Net):
    def between(self, hidden: Tensor) -> Tensor:
        self.last.weight.data.clamp_(-0.1, 0.1)
        return torch.tanh(hidden)


class ClampedWithoutGradients(Net):
    def between(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.1, 0.1)
        return torch.tanh(hidden)


class ScatterAdd(Net):
    def between(self, hidden: Tensor) -> Tensor:
        index = torch.arange(16).expand(hidden.shape[0], 16)
        return torch.tanh(hidden.scatter_add(1, index, torch.sin(hidden[:, 16:])))


class Interpolated(Net):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.last = nn.Linear(121, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        small = torch.tanh(self.first(pixel_values.flatten(1)))[:, :25].reshape(-1, 1, 5, 5)
        return self.last(F.interpolate(small, scale_factor=2.3, mode=self.mode).flatten(1))


class Power(Net):
    def between(self, hidden: Tensor) -> Tensor:
        base = torch.sigmoid(hidden) + 0.5
        return base ** (base * 2)


class ReLU6AtTheEdge(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return F.relu6(torch.round(hidden * 2) + 6 + (hidden - hidden.detach())) / 6


class FarLogits(Net):
    """Its logits go beyond 20, where log(sigmoid(x)) of fp32 is not finite."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None):  # type: ignore[override]
        logits = super().forward(pixel_values) * 200
        if labels is None:
            return logits
        wanted = F.one_hot(labels, 10).float()
        return F.binary_cross_entropy_with_logits(logits, wanted) - F.logsigmoid(logits).mean() * 0.01, logits


class ChangesItsInput(Net):
    def forward(self, pixel_values: Tensor) -> Tensor:
        pixel_values.mul_(3)
        return super().forward(pixel_values)  # type: ignore[return-value]


class RareBranch(Net):
    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = self.first(pixel_values.flatten(1))
        # About one batch of 32 in sixteen.
        if int(pixel_values.sum()) % 16 == 3:
            hidden = hidden * 4
        return self.last(torch.tanh(hidden))


class NormFirst(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.norm(pixel_values.flatten(1)))))


class NormAfterFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, pixel_values: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.first(pixel_values.flatten(1))
        return self.last(self.norm(hidden))


class Attention(Net):
    """Attention over the eight rows of an image; `case` says what is unusual."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.first = nn.Linear(8, 32)
        self.qkv = nn.Linear(32, 96)

    def forward(self, pixel_values: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self._parts(pixel_values).chunk(3, -1))
        if self.case == "detached":
            k, v = k.detach(), v.detach()
        out = F.scaled_dot_product_attention(q, k, v)
        if self.case == "reused":
            out = out + q + k * v
        return self.last(out.transpose(1, 2).flatten(2).mean(1))

    def _parts(self, pixel_values: Tensor) -> Tensor:
        return self.qkv(torch.tanh(self.first(pixel_values.squeeze(1))))


class Cell(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 32) if kind == "lstm" else nn.GRUCell(8, 32)

    def forward(self, pixel_values: Tensor) -> Tensor:
        state = None
        for row in pixel_values.squeeze(1).unbind(1):
            state = self.cell(row, state)
        return self.last(state[0] if isinstance(state, tuple) else state)


class IgnoredIndexOfAShape(Net):
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None):  # type: ignore[override]
        logits = super().forward(pixel_values)
        if labels is None:
            return logits
        return F.cross_entropy(logits, labels, ignore_index=logits.shape[1] - 1), logits


class HiddenIsAnOutput(Net):
    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.first(pixel_values.flatten(1)))
        return {"logits": self.last(hidden), "hidden": hidden}


class ScatterReduce(Net):
    def between(self, hidden: Tensor) -> Tensor:
        index = (torch.arange(32) // 4).expand_as(hidden)
        return torch.cat([hidden.new_zeros(hidden.shape[0], 8).scatter_reduce(1, index, hidden, "mean")] * 4, 1)


class Bag(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(17, 32, mode="sum")

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.last(self.bag((pixel_values.flatten(1) * 16).long().clamp(0, 16)) / 8)


class MaxPool(Net):
    def between(self, hidden: Tensor) -> Tensor:
        return F.max_pool1d(hidden.unsqueeze(1), 3, stride=1, padding=1).squeeze(1)


class EncoderLayer(Net):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.last(self.layer(self.first(pixel_values.squeeze(1))).mean(1))


class Dropped(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.drop = nn.Dropout2d(0.2) if kind == "features" else nn.AlphaDropout(0.2)

    def between(self, hidden: Tensor) -> Tensor:
        return self.drop(torch.tanh(hidden).reshape(-1, 8, 2, 2)).flatten(1)


class DroppedLSTM(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.last(self.lstm(pixel_values.squeeze(1))[0][:, -1])


class Sampled(Net):
    """The sampling of a variational autoencoder."""

    def between(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        return hidden + torch.randn_like(hidden) * torch.exp(hidden * 0.1 - 2)


class DropPath(Net):
    def between(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden + torch.tanh(hidden)
        kept = torch.empty(hidden.shape[0], 1).bernoulli_(0.8)
        return hidden + torch.tanh(hidden) * kept / 0.8
