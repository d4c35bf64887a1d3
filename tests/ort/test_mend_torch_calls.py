"""Operators that have no export of their own: nodes that call PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional

from tests.ort.precise import Case, assert_as_in_fp64

Wrap = Callable[..., nn.Module]


def losses() -> dict[str, Case]:
    def signs(y: Tensor, like: Tensor) -> Tensor:
        return 2 * y.to(like.dtype) - 1

    pair, labels = [(4, 8), (4, 8)], [((4, 8), 2)]
    return {
        "huber": Case(lambda x, y: functional.huber_loss(x, y, delta=0.3), pair),
        "huber_none": Case(lambda x, y: functional.huber_loss(x, y, reduction="none"), pair),
        "smooth_l1": Case(lambda x, y: functional.smooth_l1_loss(x, y, beta=0.7, reduction="sum"), pair),
        "l1": Case(lambda x, y: functional.l1_loss(x, y), pair),
        "soft_margin": Case(lambda x, y: functional.soft_margin_loss(x, signs(y, x)), [(4, 8)], labels),
        "bce": Case(lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y.to(x.dtype)), [(4, 8)], labels),
        "hinge": Case(lambda x, y: functional.hinge_embedding_loss(x, signs(y, x), margin=0.4), [(4, 8)], labels),
        "ranking": Case(lambda a, b, y: functional.margin_ranking_loss(a, b, signs(y, a)), pair, labels),
        "triplet": Case(lambda a, b, c: functional.triplet_margin_loss(a, b, c, swap=True), [(8,), (8,), (8,)]),
        "cosine": Case(lambda a, b: functional.cosine_embedding_loss(a, b, torch.ones(a.size(0))), [(8,), (8,)]),
        "poisson": Case(lambda x, y: functional.poisson_nll_loss(x, y, full=True), pair, positive=True),
        "multi_margin": Case(lambda x, y: functional.multi_margin_loss(x, y, p=2), [(8,)], [((), 8)]),
        "smoothed": Case(lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1), [(8,)], [((), 8)]),
        "smoothed_images": Case(
            lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.2, ignore_index=1), [(8, 3)], [((3,), 8)]
        ),
        "probabilities": Case(lambda x, y: functional.cross_entropy(x, y.softmax(1)), [(8,), (8,)]),
        "probabilities_weighted": Case(
            lambda x, y: functional.cross_entropy(x, y.softmax(1), weight=torch.linspace(0.5, 1.5, 8)), [(8,), (8,)]
        ),
        "log_likelihood": Case(lambda x, y: functional.nll_loss(x.log_softmax(-1), y), [(8,)], [((), 8)]),
        "log_likelihood_weighted": Case(
            lambda x, y: functional.nll_loss(x.log_softmax(1), y, torch.ones(8, dtype=x.dtype) * 0.7, ignore_index=1),
            [(8, 3)],
            [((3,), 8)],
        ),
        "log_likelihood_none": Case(
            lambda x, y: functional.nll_loss(x.log_softmax(1), y, reduction="none"), [(8, 2, 3)], [((2, 3), 8)]
        ),
        "ctc": Case(
            lambda x, y: functional.ctc_loss(
                x.transpose(0, 1).log_softmax(-1),
                y + 1,
                torch.full(x.shape[:1], 9, dtype=torch.long),
                torch.full(x.shape[:1], 3, dtype=torch.long),
            ),
            [(9, 6)],
            [((3,), 5)],
        ),
    }


def functions() -> dict[str, Case]:
    return {
        "bilinear": Case(lambda a, b, m: m(a, b), [(4,), (5,)], modules=[nn.Bilinear(4, 5, 3)]),
        "atan2": Case(torch.atan2, [(4,), (4,)]),
        "fmod": Case(lambda a, b: torch.fmod(a, b.abs() + 0.5), [(4,), (4,)]),
        "remainder": Case(lambda a, b: torch.remainder(a, b.abs() + 0.5) + a % 0.7, [(4,), (4,)]),
        "remainder_of_integers": Case(lambda x, y: x * (y % 3), [(4,)], [((4,), 9)]),
        "einsum_of_one": Case(
            lambda x: torch.einsum("bij->bji", x) + torch.einsum("bii->b", x)[:, None, None], [(3, 3)]
        ),
        "einsum_of_three": Case(lambda a, b, c: torch.einsum("bi,bj,bk->bijk", a, b, c), [(3,), (2,), (4,)]),
        "tensordot": Case(lambda a, b: torch.tensordot(a, torch.outer(b[0], b[0]), 1), [(5, 4), (4,)]),
        "outer_of_one": Case(lambda x: torch.outer(x[0], x[0]), [(4,)]),
        "bilinear_of_one": Case(lambda x, m: m(x, x), [(4,)], modules=[nn.Bilinear(4, 4, 3)]),
        "distance": Case(lambda a, b: functional.pairwise_distance(a, b, p=1.0, keepdim=True) * a, [(4,), (4,)]),
        "hypot": Case(torch.hypot, [(4,), (4,)]),
        "logaddexp": Case(torch.logaddexp, [(4,), (4,)]),
        "xlogy": Case(torch.xlogy, [(4,), (4,)], positive=True),
        "rot90": Case(lambda x: torch.rot90(x, 1, [1, 2]), [(4, 5)]),
        "channel_shuffle": Case(lambda x: functional.channel_shuffle(x, 2), [(4, 3, 3)]),
        "fold": Case(lambda x: functional.fold(x, (4, 5), (2, 2)), [(8, 12)]),
        "cross": Case(lambda a, b: torch.linalg.cross(a, b), [(4, 3), (4, 3)]),
        "matrix_exp": Case(lambda x: torch.linalg.matrix_exp(0.3 * x), [(3, 3)]),
        "solve": Case(lambda a, b: torch.linalg.solve(a @ a.mT + torch.eye(3), b), [(3, 3), (3, 2)]),
        "inverse": Case(lambda x: torch.linalg.inv(x @ x.mT + torch.eye(3)), [(3, 3)]),
        "cholesky": Case(lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(3)), [(3, 3)]),
        "multi_dot": Case(lambda a, b: torch.linalg.multi_dot([a[0], b[0], a[0]]), [(3, 3), (3, 3)]),
        "quantile": Case(lambda x: x.quantile(0.3, dim=1), [(6,)]),
        "nansum": Case(lambda x: x.nansum(1), [(4, 5)]),
        "hstack": Case(lambda a, b: torch.hstack([a[0], b[0]]), [(4,), (5,)]),
        "hstack_rows": Case(lambda a, b: torch.hstack([a, b]), [(4, 2), (3, 2)]),
        "vstack": Case(lambda a, b: torch.vstack([a[0], b, a[1]]), [(4,), (4,)]),
        "vstack_images": Case(lambda a, b: torch.vstack([a, b]), [(3, 4), (3, 4)]),
        "kron": Case(lambda a, b: torch.kron(a, b), [(2,), (3,)]),
        "trapezoid": Case(lambda x: torch.trapezoid(x, dx=0.5), [(6,)]),
        "diag_embed": Case(lambda x: torch.diag_embed(x, 1), [(4,)]),
        "renorm": Case(lambda x: torch.renorm(x, 2, 1, 0.7), [(4, 5)]),
        "corrcoef": Case(lambda x: torch.corrcoef(x[0]), [(4, 6)]),
        "bessel": Case(lambda x: torch.special.i1(x), [(4,)]),
        "median_of_all": Case(lambda x: x.median() + x, [(5,)]),
        "median": Case(lambda x: x.median(1)[0], [(5, 3)]),
        "kthvalue": Case(lambda x: (lambda v, i: v + i * 0.1)(*x.kthvalue(2, 1)), [(5, 3)]),
        "cummax": Case(lambda x: x.cummax(1)[0], [(5, 3)]),
        "slogdet": Case(lambda x: torch.linalg.slogdet(x @ x.mT + torch.eye(3))[1], [(3, 3)]),
        "isclose": Case(lambda a, b: a * torch.isclose(a, b, atol=0.5) + b, [(4, 5), (4, 5)]),
        "bucketize": Case(lambda x: x * torch.bucketize(x, torch.tensor([-0.5, 0.0, 0.5])), [(4, 5)]),
        "searched": Case(lambda x: x + torch.searchsorted(x.detach().sort(1)[0], x.detach()), [(5,)]),
        "prelu": Case(lambda x, m: m(x), [(4, 5)], modules=[nn.PReLU(4)]),
        "steps": Case(lambda x: x * (x.floor() + x.ceil() + x.trunc() + x.round() + x.sign()), [(4, 5)]),
        "round_to_tenths": Case(lambda x: x * x.round(decimals=1), [(4, 5)]),
        "amin": Case(lambda x: x.amin(1) - x.amax((1, 2))[:, None], [(4, 5)]),
        "minimum": Case(lambda x: x.min() * x.max() * x, [(4, 5)]),
        "det": Case(lambda x: torch.det(x) + torch.logdet(x @ x.mT + torch.eye(3)), [(3, 3)]),
        "isin": Case(lambda x, y: x * ~torch.isin(y, torch.tensor([1, 4])), [(4,)], [((4,), 9)]),
        "truths": Case(lambda x, y: x * torch.max(x > 0, y > 3) + torch.minimum(x > 1, y < 5), [(4,)], [((4,), 9)]),
        "not_aligned": Case(lambda x, y: x + torch.gcd(y, y + 4).to(x.dtype), [(4,)], [((4,), 9)]),
    }


def kept_dimensions() -> dict[str, Case]:
    """Results that are broadcast to the tensor that they are computed from."""
    return {
        "median": Case(lambda x: x - x.median(1, keepdim=True)[0], [(5, 3)]),
        "kthvalue": Case(lambda x: x * x.kthvalue(2, -1, keepdim=True)[0], [(5, 3)]),
        "mode": Case(lambda x: x - x.mode(-1, keepdim=True)[0], [(5, 3)]),
        "quantile": Case(lambda x: x / (1 + x.quantile(0.3, dim=1, keepdim=True).abs()), [(5, 3)]),
    }


def densities() -> dict[str, Case]:
    """``torch.distributions`` looks with its own operators whether arguments are valid."""

    def of_classes(x: Tensor, y: Tensor) -> Tensor:
        chosen = distributions.Categorical(logits=x)
        return chosen.log_prob(y) + chosen.entropy()

    def of_normals(x: Tensor, y: Tensor) -> Tensor:
        one = distributions.Normal(x, functional.softplus(y) + 0.1)
        return distributions.kl_divergence(one, distributions.Normal(torch.zeros_like(x), torch.ones_like(x)))

    return {
        "categorical": Case(of_classes, [(3, 8)], [((3,), 8)]),
        "normal": Case(of_normals, [(4,), (4,)]),
        "bernoulli": Case(lambda x, y: distributions.Bernoulli(logits=x).log_prob(y.to(x.dtype)), [(4,)], [((4,), 2)]),
        "all": Case(lambda x: x * (x > -9).all() + x * (x > 0).any(1, keepdim=True), [(5, 3)]),
    }


def chosen() -> dict[str, Case]:
    """Forms of operators of which torch's exporter knows another one."""

    def routed(x: Tensor, y: Tensor) -> Tensor:
        rows, places = torch.where(y == 1)
        return torch.zeros_like(x).index_add(0, rows, x[rows] * (1 + places[:, None]))

    return {
        "where": Case(routed, [(5,)], [((2,), 3)]),
        "sort": Case(lambda x: torch.sort(x, dim=1, stable=True)[0] * x, [(5, 3)]),
        "argsort": Case(
            lambda x, y: x.gather(1, torch.argsort(y, dim=1, descending=True, stable=True)), [(5,)], [((5,), 9)]
        ),
        # The other view of each sample, as in SimCLR.
        "diag": Case(lambda x: torch.diag(torch.cat([x, x.tanh()]) @ torch.cat([x, x.sin()]).mT, x.size(0)), [(5,)]),
        "diag_below": Case(lambda x: torch.diag(torch.cat([x, x.tanh()]) @ torch.cat([x, x]).mT, -x.size(0)), [(5,)]),
        "rot90": Case(lambda x: x.rot90(x.size(0), [1, 2]) * x, [(3, 3)]),
        "fake_quantization": Case(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7) + x, [(5,)]),
    }


@pytest.mark.parametrize("make", [losses, functions, kept_dimensions, densities, chosen])
def test_results_and_gradients_are_those_of_fp64(to_ort: Wrap, make: Callable[[], dict[str, Case]]) -> None:
    assert_as_in_fp64(to_ort, make())


def _complex(x: Tensor) -> Tensor:
    return torch.sgn(x.to(torch.complex64)).real


def _many(x: Tensor) -> Tensor:
    return torch.block_diag(*x.unbind(0))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_complex, "no complex numbers"),
        (_many, "takes more than 4 tensors"),
        (lambda x: torch.renorm(x, 2, 0, x.size(0)), "is not a constant"),
    ],
)
def test_what_cannot_become_a_node_is_refused_with_the_reason(
    to_ort: Wrap, function: Callable[[Tensor], Tensor], reason: str
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Any:
            return function(x * self.weight)

    with pytest.raises(Exception, match=reason):
        to_ort(Net())(torch.randn(5, 5))
