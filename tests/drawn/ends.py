"""Draws what a model returns: logits for the caller's loss, or a loss of its own with other outputs."""

from __future__ import annotations

import random

from tests.drawn.piece import Catalogue, Piece

ENDS = Catalogue()

_COMMON = [
    "F.cross_entropy(h.flatten(0, 1), labels.flatten())",
    "F.cross_entropy(h.transpose(1, 2), labels, label_smoothing=0.1)",
    "F.cross_entropy(h.flatten(0, 1), labels.flatten(), ignore_index=0)",
    "F.cross_entropy(h.flatten(0, 1), labels.flatten(), ignore_index=h.size(1))",
    "F.cross_entropy(h.flatten(0, 1), labels.flatten(), weight=torch.linspace(0.5, 1.5, 8))",
    "F.cross_entropy(h[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction='sum') / 24",
    "F.cross_entropy(h.mean(1), h.detach().mean(1).softmax(-1).roll(1, -1))",
    "F.nll_loss(h.log_softmax(-1).flatten(0, 1), labels.flatten())",
    "F.binary_cross_entropy_with_logits(h, F.one_hot(labels, 8).to(h.dtype))",
    "F.binary_cross_entropy_with_logits(5 * h, F.one_hot(labels, 8).to(h.dtype), pos_weight=torch.full((8,), 2.0))",
    "F.mse_loss(h.mean(-1), labels.to(h.dtype))",
    "F.smooth_l1_loss(h, F.one_hot(labels, 8).to(h.dtype))",
    "F.huber_loss(h.sum(-1), labels.to(h.dtype), delta=0.5)",
    "F.l1_loss(h, 3.0 * F.one_hot(labels, 8))",
    "F.kl_div(h.log_softmax(-1), F.one_hot(labels, 8).to(h.dtype), reduction='batchmean')",
    "h.pow(2).mean() + h.mean()",
    "-h.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).mean()",
]
_RARE = [
    "F.binary_cross_entropy(h.sigmoid() * 0.98 + 0.01, F.one_hot(labels, 8).to(h.dtype))",
    "F.poisson_nll_loss(h.mean(-1), labels.to(h.dtype))",
    "F.multi_margin_loss(h.flatten(0, 1), labels.flatten())",
    "F.soft_margin_loss(h, 2.0 * F.one_hot(labels, 8) - 1)",
    "F.triplet_margin_loss(h[:, 0], h[:, 1], h[:, 2])",
    "F.cosine_embedding_loss(h[:, 0], h[:, 1], torch.ones(h.size(0)))",
    "F.gaussian_nll_loss(h[..., 0], labels.to(h.dtype), h[..., 1].exp() + 0.1)",
    "F.margin_ranking_loss(h[:, 0], h[:, 1], torch.ones(h.size(0), 8), margin=0.5)",
    "F.hinge_embedding_loss(h, 2.0 * F.one_hot(labels, 8) - 1)",
]


@ENDS.kind(5)
def logits(chance: random.Random, number: int) -> Piece:
    form = chance.choice(
        ["return h", "return h", "return h, h.detach().mean()", "return {'logits': h, 'hidden': h.relu()}"]
    )
    return Piece("logits", forward=(form,))


@ENDS.kind(5)
def own_loss(chance: random.Random, number: int) -> Piece:
    form = chance.choice(
        [
            "return loss",
            "return loss, h",
            "return {'loss': loss, 'logits': h}",
            "return {'loss': loss, 'parts': [h, h * 2]}",
        ]
    )
    return Piece("loss", forward=(f"loss = {chance.choice(_RARE if chance.random() < 0.1 else _COMMON)}", form))


@ENDS.kind(0.5)
def auxiliary(chance: random.Random, number: int) -> Piece:
    init = ("self.head_a, self.head_b = nn.Linear(8, 8), nn.Linear(8, 1)",)
    forward = (
        "loss = F.cross_entropy(self.head_a(h).flatten(0, 1), labels.flatten())",
        "loss = loss + 0.3 * F.mse_loss(self.head_b(h).squeeze(-1), labels.to(h.dtype))",
        "return {'loss': loss, 'logits': h}",
    )
    return Piece("auxiliary_loss", init=init, forward=forward)
