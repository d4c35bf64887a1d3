"""Small nets whose forward uses the value of a weight or a buffer in a way that a trace may not see."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Two layers; how the first one is computed is the case."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the loss of rows [B, 8] with labels [B]."""
        logits = self.b(torch.tanh(self.hidden(x)))
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}

    def hidden(self, x: Tensor) -> Tensor:
        return self.with_weight(x, self.weight())

    def with_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.a.bias)

    def weight(self) -> Tensor:
        return self.a.weight


class Pruned(Net):
    def weight(self) -> Tensor:
        return (self.a.weight.data.abs() > 0.05) * self.a.weight


class PrunedByList(Net):
    def weight(self) -> Tensor:
        return (torch.tensor(self.a.weight.tolist()).abs() > 0.05) * self.a.weight


class Quantized(Net):
    def weight(self) -> Tensor:
        w = self.a.weight
        return w + (torch.round(w.data / 0.1) * 0.1 - w.data)


class Normed(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) / self.a.weight.data.norm(dim=1)


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", F.normalize(torch.ones(16), dim=0))

    def weight(self) -> Tensor:
        w = self.a.weight.data
        v = F.normalize(w.t() @ self.u, dim=0)
        self.u.copy_(F.normalize(w @ v, dim=0))
        return self.a.weight / (self.u @ w @ v)


class SpectralData(Spectral):
    def weight(self) -> Tensor:
        w = self.a.weight.data
        v = F.normalize(w.t() @ self.u, dim=0)
        self.u.data = F.normalize(w @ v, dim=0)
        return self.a.weight / (self.u @ w @ v)


class WeighedLoss(Net):
    def __init__(self) -> None:
        super().__init__()
        self.uncertainty = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x, labels)
        loss = outputs["loss"] * torch.exp(-self.uncertainty.data) + self.uncertainty.pow(2) + 0.1 * self.uncertainty
        return outputs | {"loss": loss.sum()}


class GateByList(Net):
    """The weight is zero at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(16))

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        return hidden * (1 + self.gate) + torch.tensor(self.gate.tolist()) * hidden.detach()


class CopiedInForward(Net):
    def weight(self) -> Tensor:
        self.copy = nn.Parameter(self.a.weight.detach().clone(), requires_grad=False)
        return self.a.weight * self.copy.abs()


class DeepCopied(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + copy.deepcopy(self.a)(x)


class Alias(Net):
    def __init__(self) -> None:
        super().__init__()
        self.alias = self.a.weight.data

    def weight(self) -> Tensor:
        return self.a.weight * self.alias.abs()


class AliasOfArray(Net):
    def __init__(self) -> None:
        super().__init__()
        self.alias = self.a.weight.detach().numpy()

    def weight(self) -> Tensor:
        return self.a.weight * torch.from_numpy(self.alias).abs()


class Listed(Net):
    def weight(self) -> Tensor:
        return self.a.weight * torch.tensor(self.a.weight.tolist()).abs()


class Array(Net):
    def weight(self) -> Tensor:
        return self.a.weight * torch.from_numpy(abs(self.a.weight.detach().numpy()))


class Item(Net):
    def weight(self) -> Tensor:
        return self.a.weight / self.a.weight.norm().item()


class Stored(Net):
    def weight(self) -> Tensor:
        w = torch.empty(0).set_(self.a.weight.untyped_storage(), 0, (16, 8), (8, 1))
        return self.a.weight * w.abs()


class OnlyInGradients(Net):
    """The value scales a gradient, and no output."""

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        return hidden.detach() + (hidden - hidden.detach()) * torch.tensor(self.a.weight.tolist()).norm(dim=1)


class DataOfInput(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        return hidden - hidden.data.mean(1, keepdim=True) + x.data.mean()


class ClampedActivation(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x) * 1.0
        hidden.data.clamp_(-0.3, 0.3)
        return hidden


class ClampedResult(Net):
    """PyTorch differentiates tanh by its result, which is another one here."""

    def hidden(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(super().hidden(x))
        hidden.data.clamp_(-0.3, 0.3)
        return hidden


class AssignedActivation(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x) * 1.0
        hidden.data = hidden.data * 2
        return hidden


class AveragedThroughData(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        self.average.data.mul_(0.9).add_(hidden.data.mean(0), alpha=0.1)
        return hidden - self.average


class AveragedByAssignment(AveragedThroughData):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = Net.hidden(self, x)
        self.average.data = 0.9 * self.average.data + 0.1 * hidden.data.mean(0)
        return hidden - self.average


class Teacher(Net):
    """A copy of the weights follows them, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)

    def hidden(self, x: Tensor) -> Tensor:
        self.teacher.weight.data.mul_(0.5).add_(self.a.weight.data, alpha=0.5)
        return super().hidden(x) + self.teacher(x)


class Queue(Net):
    """MoCo's queue of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(48, 16))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def hidden(self, x: Tensor) -> Tensor:
        keys = super().hidden(x)
        hidden = keys + 0.1 * torch.softmax(keys @ self.bank.clone().t(), 1) @ self.bank.clone()
        at, count = int(self.at), len(x)
        self.bank[at : at + count] = keys.detach()
        self.at[0] = (at + count) % len(self.bank)
        return hidden


class Schedule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def hidden(self, x: Tensor) -> Tensor:
        factor = min(1.0, self.step.item() / 1000)
        self.step += 1
        return super().hidden(x) * (1 + 40 * factor)


class SlowSchedule(Schedule):
    def hidden(self, x: Tensor) -> Tensor:
        factor = min(1.0, int(self.step) / 1000)
        self.step += 1
        return Net.hidden(self, x) * (1 + factor)


class FirstBatch(Net):
    """Statistics of the first batch, as in ActNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initialised", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(16))

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        if self.initialised == 0:
            self.mean.copy_(hidden.detach().mean(0))
            self.initialised += 1
        return hidden - self.mean


class EveryFourth(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        if int(self.count) % 4 == 3:
            hidden = hidden * 2
        self.count += 1
        return hidden


class EveryFourthWrites(EveryFourth):
    """What the decision writes into a buffer shows in no gradient of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(16))

    def hidden(self, x: Tensor) -> Tensor:
        hidden = Net.hidden(self, x)
        out = hidden + self.kept.clone()
        if int(self.count) % 4 == 3:
            self.kept.copy_(hidden.detach().mean(0))
        self.count += 1
        return out


class RareTruth(EveryFourthWrites):
    """A truth that is met without an effect, and has one later."""

    def hidden(self, x: Tensor) -> Tensor:
        hidden = Net.hidden(self, x)
        out = hidden
        if self.count % 2 == 1:
            out = hidden * (1 + (self.count > 8).float())
        self.count += 1
        return out


class Codebook(Net):
    """Its entries are the first batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", torch.tensor(False))
        self.register_buffer("entries", torch.zeros(4, 16))

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        if not self.made:
            self.entries.copy_(hidden.detach()[:4])
            self.made.fill_(True)
        nearest = torch.cdist(hidden, self.entries).argmin(1)
        return hidden + (self.entries[nearest] - hidden).detach()


class CumulativeMean(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(16))

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        count = int(self.count) + 1
        self.mean += (hidden.detach().mean(0) - self.mean) / count
        self.count += 1
        return hidden - self.mean


class Counted(Net):
    """Python reads it and nothing depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def hidden(self, x: Tensor) -> Tensor:
        self.count += 1
        self.shown = f"step {int(self.count)}"
        return super().hidden(x)


class PrunedByAlias(Alias):
    def weight(self) -> Tensor:
        return self.a.weight * (self.alias.abs() > 0.05)


class QuantizedByAlias(Alias):
    def weight(self) -> Tensor:
        return self.a.weight + (torch.round(self.alias / 0.1) * 0.1 - self.alias)


class DroppingQueue(Queue):
    def hidden(self, x: Tensor) -> Tensor:
        return F.dropout(super().hidden(x), 0.3)


class Strict(Net):
    """It takes no other weights than those that it was made with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", self.a.weight.detach().clone())

    def weight(self) -> Tensor:
        if (self.a.weight != self.first).any():
            raise ValueError("other weights")
        return self.a.weight


class Bounded(Net):
    """Python asks about a weight that is at the bound when the run starts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def hidden(self, x: Tensor) -> Tensor:
        scale = self.scale if self.scale.max() < 1.1 else self.scale * 0
        return super().hidden(x) * scale


class Penalized(Net):
    """A norm of each weight is a part of the loss."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x, labels)
        return outputs | {"loss": outputs["loss"] + 0.01 * sum(one.norm(2) ** 2 for one in self.parameters())}


class RecurrentOnASlice(Net):
    """A recurrent layer over one of several series, after an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(2, 4, 2))
        self.recurrent = nn.LSTM(2, 16, batch_first=True)

    def hidden(self, x: Tensor) -> Tensor:
        series = torch.stack([x, x * 2], 1).unflatten(2, (4, 2)) + self.place
        return super().hidden(x) + self.recurrent(series[:, 0])[0][:, -1]


class VectorQuantized(Net):
    """VQ-VAE's codebook and its two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = nn.Embedding(6, 16)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x)
        entries = self.codebook.weight
        apart = hidden.square().sum(1, keepdim=True) + entries.square().sum(1) - 2 * hidden @ entries.t()
        chosen = torch.zeros(len(x), 6).scatter_(1, apart.argmin(1).unsqueeze(1), 1) @ entries
        losses = F.mse_loss(chosen, hidden.detach()) + 0.25 * F.mse_loss(chosen.detach(), hidden)
        logits = self.b(hidden + (chosen - hidden).detach())
        return {"logits": logits, "loss": F.cross_entropy(logits, labels) + losses}


class ShiftedBank(Net):
    """A bank of the last keys: the batch comes in front, and as many fall out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.ones(30, 16))

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        near = torch.softmax(hidden @ self.bank.t(), 1) @ self.bank
        self.bank = torch.cat([hidden.detach(), self.bank[: -x.size(0)]])
        return hidden + 0.1 * near


class LoopOverRows(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return torch.stack([row * (1 + 0.1 * index) for index, row in enumerate(super().hidden(x))])


class ByItsRoot(Net):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x, labels)
        return outputs | {"loss": outputs["loss"] * 3 / math.sqrt(len(x))}


class OthersOfTheBatch(Net):
    """A loss that compares each sample with all others, with masks and indices made of the batch's size."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x, labels)
        count = len(x)
        alike = F.cosine_similarity(outputs["logits"][:, None], outputs["logits"][None], dim=2)
        others = alike * (1 - torch.eye(count))
        chosen = -outputs["logits"].log_softmax(1)[torch.arange(count), labels]
        pairs = alike[torch.triu_indices(count, count, offset=1).unbind()]
        return outputs | {"loss": others.sum() / (count * (count - 1)) + chosen.mean() + 0.1 * pairs.square().mean()}


class Transported(Net):
    """Sinkhorn's iterations with masses of one part in the size of the batch."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x, labels)
        cost = (outputs["logits"][:, None] - x[None, :, :3]).square().sum(-1)
        mass = torch.empty(len(x)).fill_(1.0 / len(x))
        first, second = torch.zeros_like(mass), torch.zeros_like(mass)
        for _ in range(2):
            first = mass.log() - torch.logsumexp(second[None] - cost, 1)
            second = mass.log() - torch.logsumexp(first[:, None] - cost, 0)
        plan = (first[:, None] + second[None] - cost).exp()
        return outputs | {"loss": outputs["loss"] + (plan * cost).sum()}


class AtRisk(Net):
    """Cox's loss, in a loop over the samples."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x, labels)
        risk, time, has_event = outputs["logits"][:, 0], x[:, 0], (x[:, 1] > 0).float()
        terms = [has_event[i] * (risk[i] - risk[time >= time[i]].logsumexp(0)) for i in range(len(x))]
        return outputs | {"loss": outputs["loss"] - torch.stack(terms).sum() / (1 + has_event.sum())}


BY_SIZE = [LoopOverRows, OthersOfTheBatch, ByItsRoot, Transported, AtRisk]
