"""Draws what models do beside calling layers: composition, in-place changes, views, hooks, state, branches, dtypes."""

# ruff: noqa: E501
from __future__ import annotations

import random
from dataclasses import replace

from tests.drawn.layers import LAYERS
from tests.drawn.piece import Catalogue, Piece, numbered

FEATURES = Catalogue()


def _one_of(name: str, weight: float, *ways: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]) -> None:
    """Registers a kind of piece that is one of several ways, each given by its lines: top, ``__init__``, ``forward``."""

    def make(chance: random.Random, number: int) -> Piece:
        which = chance.randrange(len(ways))
        top, init, forward = ways[which]
        return numbered(Piece(f"{name}_{which}", top, init, forward), number)

    FEATURES.kind(weight)(make)


def _around(name: str, weight: float, *ways: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]) -> None:
    """As `_one_of`, for pieces with one or two layers inside."""

    def make(chance: random.Random, number: int) -> Piece:
        which = chance.randrange(len(ways))
        top, init, forward = ways[which]
        inside = tuple(LAYERS.draw(chance, 10 * number + 1 + index) for index in range(chance.choice([1, 1, 2])))
        return replace(numbered(Piece(f"{name}_{which}", top, init, forward), number), body=inside)

    FEATURES.kind(weight)(make)


_LINEAR = "self.part# = nn.Linear(8, 8)"
_ONE = "self.one# = nn.Parameter(torch.rand(8) + 0.5)"

_around(
    "residual",
    5,
    ((), (), ("r# = h", "BODY", "h = h + r#")),
    ((), ("self.gate# = nn.Parameter(torch.zeros(1))",), ("r# = h", "BODY", "h = r# + self.gate# * h")),
    ((), (), ("r# = h.clone()", "BODY", "r# += h", "h = r#")),
    ((), (), ("a#, b# = h, h.flip(1)", "h = a#", "BODY", "h = torch.cat([h, b#], -1)[..., ::2]")),
)
_around(
    "shared",
    3,
    ((), (), ("for _ in range(2):", "    BODY")),
    ((), (), ("first# = h", "BODY", "h = torch.tanh(h) + first#", "BODY")),
)
_around(
    "no_grad",
    3,
    ((), (), ("r# = h", "with torch.no_grad():", "    BODY", "h = r# + h")),
    ((), (), ("r# = h", "h = h.detach()", "BODY", "h = r# + h")),
    ((), (), ("r# = h", "BODY", "h = r# + h.detach() * r#.mean()")),
    ((), (), ("with torch.no_grad():", "    BODY", "h = h.detach()")),
    (
        (),
        (_ONE,),
        ("with torch.no_grad():", "    r# = h", "    with torch.enable_grad():", "        BODY", "h = h * self.one#"),
    ),
)
_around(
    "dtype",
    2,
    ((), (), ("h = h.to(torch.float64)", "h = h.cumsum(1) / 3", "h = h.to(torch.float32)", "BODY")),
    ((), (), ("r# = h.to(torch.bfloat16)", "BODY", "h = h + r#")),
    ((), (), ("BODY", "h = (h.to(torch.float64) ** 2).to(torch.float32) * 0.1 + h")),
    ((), (), ("with torch.autocast('cpu', torch.bfloat16):", "    BODY", "h = h.to(torch.float32)")),
    ((), (), ("BODY", "h = h.half().to(torch.float32)")),
)
_around(
    "branch_on_values",
    2.5,
    ((), (), ("if h.mean() > 0:", "    BODY", "h = h * 1.1")),
    ((), (), ("if x[0, 0, 0] > 0.5:", "    BODY", "h = h * 1.1")),
    ((), (), ("for _ in range(int(ids[0, 0]) % 3):", "    BODY")),
    ((), (), ("if bool((ids == 3).any()):", "    BODY")),
    ((), (), ("BODY", "if torch.isnan(h).any():", "    h = torch.zeros_like(h)")),
    ((), (), ("BODY", "if h.abs().max() > 3:", "    h = h / h.abs().max()")),
)
_around(
    "branch_on_mode",
    2,
    ((), (), ("if self.training:", "    BODY")),
    ((), (), ("if h.size(1) > 4 and h.shape[-1] % 2 == 0:", "    BODY")),
    ((), (), ("if h.dim() == 3 and h.requires_grad:", "    BODY", "h = h * 0.9")),
    ((), (), ("if x.is_floating_point() and isinstance(h, torch.Tensor):", "    BODY")),
)
_around(
    "python_state",
    3,
    ((), ("self.calls# = 0",), ("BODY", "h = h * min(1.0, 0.2 + 0.2 * self.calls#)", "self.calls# += 1")),
    ((), ("self.state# = {'n': 0}",), ("BODY", "h = h + 0.1 * self.state#['n']", "self.state#['n'] += 1")),
    (("COUNT# = [0]",), (), ("BODY", "COUNT#[0] += 1", "h = h / COUNT#[0]")),
    (
        (
            "def counter#():",
            "    n = 0",
            "    def count():",
            "        nonlocal n",
            "        n += 1",
            "        return n",
            "    return count",
        ),
        ("self.count# = counter#()",),
        ("BODY", "h = h * (1 + 0.1 * self.count#())"),
    ),
    ((), ("self.seen# = []",), ("BODY", "self.seen#.append(h.size(0))", "h = h / len(self.seen#)")),
    (
        (),
        ("self.last# = None",),
        ("BODY", "h = h if self.last# is None else h + self.last#", "self.last# = h.detach()"),
    ),
    ((), ("self.calls# = 0",), ("self.calls# += 1", "BODY")),
    ((), ("self.log# = []",), ("BODY", "self.log#.append(h.detach().mean())")),
)
_around(
    "python_values",
    3,
    (("FACTOR# = 0.7",), (), ("BODY", "h = h * FACTOR#")),
    (
        (
            "def scaled#(factor):",
            "    return lambda t: t * factor",
        ),
        ("self.scaled# = scaled#(0.6)",),
        ("BODY", "h = self.scaled#(h)"),
    ),
    ((), ("self.table# = {'a': 0.5, 'b': [1, 2]}",), ("BODY", "h = h * self.table#['a'] + self.table#['b'][1]")),
    (("TABLE# = torch.linspace(0.5, 1.5, 8)",), (), ("BODY", "h = h * TABLE#")),
    ((), ("self.plain# = torch.linspace(0.5, 1.5, 8)",), ("BODY", "h = h + self.plain#")),
    ((), ("self.rates# = (0.5, 2)",), ("for rate# in self.rates#:", "    h = h * rate#", "BODY")),
)
_around(
    "hook",
    2.5,
    (
        (),
        (_LINEAR, "self.part#.register_forward_hook(lambda module, args, out: out * 1.5)"),
        ("BODY", "h = self.part#(h)"),
    ),
    (
        (),
        (_LINEAR, "self.part#.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))"),
        ("BODY", "h = self.part#(h)"),
    ),
    ((), (), ("BODY", "if h.requires_grad:", "    h.register_hook(lambda g: g * 0.5)", "h = h * 1.0")),
    (
        (),
        (_LINEAR, "self.part#.register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5,))"),
        ("BODY", "h = h + self.part#(h * 1.0)"),
    ),
    (
        (),
        (_LINEAR, "self.part#.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))"),
        ("BODY", "h = h + self.part#(h)"),
    ),
    (
        (),
        (_LINEAR, "self.part#.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))"),
        ("BODY", "h = h + self.part#(h)"),
    ),
    ((), (_LINEAR, "self.part#.register_forward_hook(lambda module, args, out: None)"), ("h = self.part#(h)", "BODY")),
)
_around(
    "checkpoint",
    1,
    (
        ("from torch.utils.checkpoint import checkpoint",),
        (_LINEAR,),
        ("h = checkpoint(lambda t: torch.relu(self.part#(t)), h, use_reentrant=False)", "BODY"),
    ),
)
_one_of(
    "in_place",
    4,
    ((), (_ONE,), ("h = h * self.one#", "h.add_(1.0)")),
    ((), (_ONE,), ("h = h * self.one#", "h[:, 0] = 0.5")),
    ((), (_ONE,), ("h = h * self.one#", "h[:, :, ::2] *= 0.5")),
    ((), (_ONE,), ("h = h * self.one#", "h.masked_fill_(ids.unsqueeze(-1) == 0, 0.1)")),
    ((), (_ONE,), ("h = h * self.one#", "h.relu_()")),
    ((), (_ONE,), ("h = h * self.one#", "v# = h[:, 1:3]", "v#.mul_(0.3)")),
    (
        (),
        (_ONE,),
        ("y# = torch.zeros_like(h)", "for t# in range(h.size(1)):", "    y#[:, t#] = h[:, t#] * self.one#", "h = y#"),
    ),
    ((), (_ONE,), ("h = (h * self.one#).clone()", "h.view(-1, 8)[0].zero_()")),
    ((), (_ONE,), ("h = h * self.one#", "h.transpose(1, 2).sub_(0.5)")),
    ((), (_ONE,), ("h = h.clone()", "h[ids == 2] = self.one#")),
    ((), (_ONE,), ("h = h * self.one#", "h += h.flip(1)", "h /= 2")),
    ((), (_ONE,), ("h = (h * self.one#).contiguous()", "h.scatter_(1, ids[:, :2, None].expand(-1, -1, 8) % 6, 0.5)")),
    ((), (_ONE,), ("h = h.index_add(1, ids[0] % 6, h * self.one#)",)),
    ((), (_ONE,), ("h = torch.scatter_add(h * self.one#, 1, (ids % 6).unsqueeze(-1).expand_as(h), h)",)),
    ((), (_ONE,), ("x.mul_(0.5)", "h = h * self.one#")),
    ((), (_ONE,), ("h = h * self.one#", "h.data.clamp_(-1, 1)")),
    ((), (_ONE,), ("h = h * self.one#", "h[..., 0].copy_(h[..., 1].detach())")),
)
_one_of(
    "view",
    4,
    ((), (_ONE,), ("h = h.reshape(h.size(0), -1).view(h.size(0), 8, 6).transpose(1, 2) * self.one#",)),
    ((), (_ONE,), ("a#, b# = h.chunk(2, -1)", "h = torch.cat([b#, a#], -1) * self.one#")),
    ((), (_ONE,), ("a#, b#, c# = h.split([2, 1, 3], 1)", "h = torch.cat([c#, a# * self.one#, b#], 1)")),
    ((), (_ONE,), ("h = torch.stack([t * self.one# for t in h.unbind(1)][::-1], 1)",)),
    ((), (_ONE,), ("h = h * self.one#.expand(h.shape)[..., torch.arange(7, -1, -1)]",)),
    ((), (_ONE,), ("h = h.as_strided(h.shape, h.stride()) * self.one#",)),
    ((), (_ONE,), ("h = h.narrow(1, 1, 4).repeat(1, 2, 1)[:, :6] * self.one#",)),
    ((), (_ONE,), ("h = h.unfold(1, 3, 1).mean(-1).repeat_interleave(2, 1)[:, :6] * self.one#",)),
    ((), (_ONE,), ("h = h.roll(1, 1).permute(2, 0, 1).movedim(0, -1) * self.one#",)),
    ((), (_ONE,), ("h = h.swapaxes(1, 2).contiguous().flatten(1).unflatten(1, (6, 8)) * self.one#",)),
    ((), (_ONE,), ("h = h.tril() + h.triu(1) * self.one#",)),
    ((), (_ONE,), ("h = h + torch.diagonal(h @ h.mT, dim1=1, dim2=2).unsqueeze(-1) * self.one#",)),
    ((), (_ONE,), ("h = h[:, ids[0] % 6] * self.one#",)),
    ((), (_ONE,), ("h = h.gather(1, (ids % 6).unsqueeze(-1).expand_as(h)) * self.one#",)),
    ((), (_ONE,), ("h = h.index_select(1, torch.tensor([5, 3, 1, 0, 2, 4])) * self.one#",)),
    ((), (_ONE,), ("h = torch.take_along_dim(h, h.argsort(1), 1) * self.one#",)),
    ((), (_ONE,), ("s#, i# = h.sort(1)", "h = s# * self.one# + i# * 0.01")),
    ((), (_ONE,), ("v#, i# = h.topk(3, 1)", "h = torch.cat([v#, v# * self.one#], 1)")),
    ((), (_ONE,), ("h = torch.where(ids.unsqueeze(-1) > 4, h * self.one#, h - 0.5)",)),
    ((), (_ONE,), ("m# = ids > 4", "h = h + (h[m#] * self.one#).sum(0)")),
    ((), (_ONE,), ("h = F.pad(h, (1, 1, 2, 0), value=0.3)[:, 1:7, 1:9] * self.one#",)),
    ((), (_ONE,), ("g#, y# = torch.meshgrid(h[0, :, 0], self.one#, indexing='ij')", "h = h + g# * y#")),
    ((), (_ONE,), ("n# = F.one_hot(ids, 11).to(h.dtype)", "h = h + n#[..., :8] * self.one#")),
    ((), (_ONE,), ("b#, t#, d# = h.shape", "h = (h.view(b# * t#, d#) * self.one#).view(b#, t#, -1)")),
)
_one_of(
    "arithmetic",
    4,
    ((), (_ONE,), ("h = torch.addmm(h.flatten(0, 1), h.flatten(0, 1), torch.diag(self.one#)).view_as(h)",)),
    ((), (_ONE,), ("h = h.abs().add(0.1) ** (self.one# * h.sigmoid())",)),
    ((), (_ONE,), ("h = h - torch.logsumexp(h * self.one#, -1, keepdim=True)",)),
    ((), (_ONE,), ("h = (h * self.one#) / h.norm(dim=-1, keepdim=True).clamp_min(1e-6)",)),
    ((), (_ONE,), ("h = torch.lerp(h, h.flip(1), self.one#)",)),
    ((), (_ONE,), ("h = h + h.cumsum(1) * self.one# * 0.1",)),
    ((), (_ONE,), ("h = torch.maximum(h, h.roll(1, -1)) * self.one#",)),
    ((), (_ONE,), ("h = (h - h.mean((0, 1))) / (h.std((0, 1)) + 0.1) * self.one#",)),
    (
        (),
        (_ONE,),
        ("h = (h - h.amin(1, keepdim=True)) / (h.var(1, keepdim=True, unbiased=False) + 1).sqrt() * self.one#",),
    ),
    ((), (_ONE,), ("h = torch.atan2(h, h.roll(1, 1).abs() + 0.5) * self.one#",)),
    ((), (_ONE,), ("h = h.clamp(-1.0, 1.0) * self.one# + h.prod(1, keepdim=True)",)),
    ((), (_ONE,), ("h = torch.baddbmm(h @ h.mT, h, h.mT, beta=0.5).softmax(-1) @ (h * self.one#)",)),
    ((), (_ONE,), ("h = torch.addcmul(h, h, self.one#, value=0.3).erf()",)),
    ((), (_ONE,), ("h = F.normalize(h, dim=1) * self.one# + h.max(1, keepdim=True)[0]",)),
    ((), (_ONE,), ("h = F.logsigmoid(h * 15) * self.one# * 0.1",)),
    ((), (_ONE,), ("h = torch.tensordot(h, torch.outer(self.one#, self.one#), 1) / 8",)),
    ((), (_ONE,), ("h = F.linear(h, self.one#.outer(self.one#.tanh())) / 8",)),
    ((), (_ONE,), ("h = h * self.one# % 1.0 + torch.fmod(h, 2.0) + torch.remainder(h, 0.7)",)),
    ((), (_ONE,), ("h = (h.round() - h).detach() + h * self.one#",)),
    ((), (_ONE,), ("h = torch.cdist(h, h * self.one# + 1.0) @ h",)),
    ((), (_ONE,), ("h = h * self.one# + (h > 0) * 0.3 + (ids > 3).to(h.dtype).unsqueeze(-1)",)),
    ((), (_ONE,), ("h = h * self.one# + ((ids > 2) & (ids < 7) | (ids == 9)).float().unsqueeze(-1)",)),
    ((), (_ONE,), ("h = torch.special.expit(h) * self.one# + torch.log1p(h.abs()) - torch.expm1(-h.abs())",)),
    ((), (_ONE,), ("h = h * self.one# * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)",)),
    (
        (),
        (_ONE,),
        (
            "c#, s# = torch.cos(torch.arange(6.0)), torch.sin(torch.arange(6.0))",
            "h = h * self.one# * c#[:, None] + h.flip(-1) * s#[:, None]",
        ),
    ),
)
_one_of(
    "parameters",
    3,
    ((), (_LINEAR, "self.part#.weight.requires_grad_(False)"), ("h = h + self.part#(h)",)),
    ((), (_LINEAR, "self.part#.requires_grad_(False)"), ("h = self.part#(h) + h",)),
    ((), (_LINEAR, "self.spare# = nn.Linear(8, 8)"), ("h = self.part#(h)",)),
    (
        (),
        (_LINEAR, "self.twin# = nn.Linear(8, 8)", "self.twin#.weight = self.part#.weight"),
        ("h = self.twin#(self.part#(h).tanh())",),
    ),
    ((), ("self.all# = nn.ParameterList([torch.rand(8), torch.rand(1)])",), ("for p# in self.all#:", "    h = h * p#")),
    (
        (),
        ("self.some# = nn.ModuleDict({'a': nn.Linear(8, 8), 'b': nn.Tanh()})",),
        ("for m# in self.some#.values():", "    h = m#(h)"),
    ),
    (
        (),
        ("self.list# = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))",),
        ("for m# in self.list#:", "    h = h + m#(h).relu()"),
    ),
    ((), (_LINEAR,), ("self.part#.weight.data.clamp_(-0.2, 0.2)", "h = self.part#(h)")),
    ((), (_LINEAR,), ("with torch.no_grad():", "    self.part#.weight.mul_(0.9)", "h = self.part#(h)")),
    ((), (_LINEAR,), ("h = h + self.part#(h.mean(1)).unsqueeze(1) + self.part#.weight.norm()",)),
    ((), ("self.scalar# = nn.Parameter(torch.tensor(0.7))",), ("h = h * self.scalar# + self.scalar# ** 2",)),
    ((), (_LINEAR,), ("w# = self.part#.weight - self.part#.weight.mean()", "h = F.linear(h, w#, self.part#.bias)")),
)
_one_of(
    "buffer",
    3,
    ((), ("self.register_buffer('fixed#', torch.linspace(0.5, 1.5, 8))",), ("h = h * self.fixed#",)),
    (
        (),
        ("self.register_buffer('mean#', torch.zeros(8))",),
        ("self.mean#.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)", "h = h - self.mean#"),
    ),
    (
        (),
        ("self.register_buffer('mean#', torch.zeros(8))",),
        ("h = h - self.mean#", "with torch.no_grad():", "    self.mean#.lerp_(h.mean((0, 1)), 0.1)"),
    ),
    ((), ("self.register_buffer('n#', torch.zeros(()))",), ("self.n# += 1", "h = h / self.n#")),
    (
        (),
        ("self.register_buffer('mean#', torch.zeros(8))",),
        ("self.mean# = 0.9 * self.mean# + 0.1 * h.detach().mean((0, 1))", "h = h - self.mean#"),
    ),
    (
        (),
        ("self.register_buffer('seen#', torch.zeros(11))",),
        ("self.seen#.index_add_(0, ids.flatten(), torch.ones(ids.numel()))",),
    ),
    ((), ("self.register_buffer('n#', torch.tensor(0), persistent=False)",), ("self.n#.add_(1)",)),
)
_FUNCTION = ("class Own#(torch.autograd.Function):", "    @staticmethod")
_one_of(
    "function",
    3,
    (
        (
            *_FUNCTION,
            "    def forward(ctx, t):",
            "        return t",
            "    @staticmethod",
            "    def backward(ctx, g):",
            "        return g",
        ),
        (_LINEAR,),
        ("h = self.part#(Own#.apply(h))",),
    ),
    (
        (
            *_FUNCTION,
            "    def forward(ctx, t):",
            "        return t.view_as(t)",
            "    @staticmethod",
            "    def backward(ctx, g):",
            "        return -0.5 * g",
        ),
        (_LINEAR,),
        ("h = Own#.apply(self.part#(h))",),
    ),
    (
        (
            *_FUNCTION,
            "    def forward(ctx, t):",
            "        return t.sign()",
            "    @staticmethod",
            "    def backward(ctx, g):",
            "        return g",
        ),
        (_LINEAR,),
        ("h = h + Own#.apply(self.part#(h)) * 0.1",),
    ),
    (
        (
            *(
                *_FUNCTION,
                "    def forward(ctx, t, w):",
                "        ctx.save_for_backward(t, w)",
                "        return t * w",
                "    @staticmethod",
            ),
            *(
                "    def backward(ctx, g):",
                "        t, w = ctx.saved_tensors",
                "        return g * w, (g * t).sum((0, 1))",
            ),
        ),
        (_ONE,),
        ("h = Own#.apply(h, self.one#)",),
    ),
    (
        (
            *_FUNCTION,
            "    def forward(ctx, t):",
            "        return t * 2",
            "    @staticmethod",
            "    def backward(ctx, g):",
            "        return g * 2",
        ),
        (),
        ("h = Own#.apply(h)",),
    ),
)
_one_of(
    "numbers",
    1,
    ((), (_ONE,), ("h = h * self.one# * float(x.abs().max())",)),
    ((), (_ONE,), ("h = h * self.one# + h.detach().mean().item()",)),
    ((), (_ONE,), ("h = h * self.one# + torch.tensor(h.detach().numpy().mean())",)),
    ((), (_ONE,), ("i# = ids.nonzero()", "h = h * self.one# + i#.to(h.dtype).mean()")),
    ((), (_ONE,), ("h = h * self.one# * (h.numel() ** -0.5) * h.size(1)",)),
    ((), (_ONE,), ("n# = int((ids > 0).sum(1).max())", "h = h * self.one#", "h = F.pad(h[:, :n#], (0, 0, 0, 6 - n#))")),
)


@FEATURES.kind(0.5)
def noise(chance: random.Random, number: int) -> Piece:
    forward = chance.choice(
        [
            "h = h + 0.1 * torch.randn_like(h)",
            "h = h * (torch.rand(h.shape) > 0.2)",
            "h = h + torch.bernoulli(h.sigmoid().detach())",
        ]
    )
    return numbered(Piece("noise", forward=(forward,), is_random=True), number)
