"""Draws layers of ``torch.nn`` with arguments of all kinds."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from tests.drawn.piece import BATCH, LENGTH, TOKENS, WIDTH, Catalogue, Piece, numbered

LAYERS = Catalogue()

_AS_CHANNELS = "h.transpose(1, 2)"
_AS_IMAGE = "h.reshape(-1, 2, 4, 6)"
_AS_VOLUME = "h.reshape(-1, 2, 2, 3, 4)"


def _shape(layer: str, given: str) -> tuple[int, ...] | None:
    """The shape of what the layer returns; None if it does not take these arguments."""
    names = {"torch": torch, "nn": nn, "F": F, "h": torch.zeros(BATCH, LENGTH, WIDTH)}
    try:
        with torch.no_grad():
            result = eval(f"({layer})({given})", names)
    except Exception:
        return None
    return tuple(result.shape) if isinstance(result, torch.Tensor) and result.numel() <= 2000 else None


def _joined(kind: str, layer: str, given: str, chance: random.Random, number: int) -> Piece | None:
    """A piece that calls a layer and adds to ``h`` what it returns; None if the layer does not take the arguments."""
    shape = _shape(layer, given)
    if shape is None or 0 in shape or shape[0] != BATCH:
        return None
    init, call = [f"self.layer# = {layer}"], f"self.layer#({given})"
    if shape == (BATCH, LENGTH, WIDTH):
        forward = [f"h = {call}" if chance.random() < 0.6 else f"h = h + {call}"]
    elif shape == (BATCH, WIDTH, LENGTH):
        forward = [f"h = {call}.transpose(1, 2)"]
    else:
        size = torch.Size(shape[1:]).numel()
        init.append(f"self.out# = nn.Linear({size}, {WIDTH})")
        forward = [f"h = h + self.out#({call}.flatten(1)).unsqueeze(1)"]
    return numbered(Piece(kind, init=tuple(init), forward=tuple(forward)), number)


@LAYERS.kind(2)
def linear(chance: random.Random, number: int) -> Piece:
    bias = "" if chance.random() < 0.7 else ", bias=False"
    init = (f"self.linear# = nn.Linear({WIDTH}, {WIDTH}{bias})",)
    return numbered(Piece("linear", init=init, forward=("h = self.linear#(h)",)), number)


@LAYERS.kind(2)
def mlp(chance: random.Random, number: int) -> Piece:
    act = chance.choice(
        ["nn.ReLU()", "nn.GELU()", "nn.GELU('tanh')", "nn.SiLU()", "nn.Tanh()", "nn.ReLU(inplace=True)"]
    )
    init = (f"self.mlp# = nn.Sequential(nn.Linear({WIDTH}, 16), {act}, nn.Linear(16, {WIDTH}))",)
    return numbered(Piece("mlp", init=init, forward=("h = h + self.mlp#(h)",)), number)


@LAYERS.kind(4)
def convolution(chance: random.Random, number: int) -> Piece:
    while True:
        dims = chance.choice([1, 1, 2, 2, 2, 3])
        given = {1: _AS_CHANNELS, 2: _AS_IMAGE, 3: _AS_VOLUME}[dims]
        channels = {1: WIDTH, 2: 2, 3: 2}[dims]
        out = chance.choice([channels, channels, 2 * channels])
        options = [str(channels), str(out), str(chance.choice([1, 2, 3, 3, 3, 5]))]
        if chance.random() < 0.25:
            options.append("stride=2")
        if chance.random() < 0.75:
            options.append("padding=" + chance.choice(["'same'", "'same'", "'valid'", "1", "1", "2"]))
        if chance.random() < 0.2:
            options.append("dilation=2")
        if chance.random() < 0.2:
            options.append(f"groups={channels}")
        if chance.random() < 0.25:
            options.append("padding_mode=" + chance.choice(["'reflect'", "'replicate'", "'circular'"]))
        if chance.random() < 0.3:
            options.append("bias=False")
        piece = _joined(f"conv{dims}d", f"nn.Conv{dims}d({', '.join(options)})", given, chance, number)
        if piece is not None:
            return piece


@LAYERS.kind(1)
def transposed_convolution(chance: random.Random, number: int) -> Piece:
    while True:
        dims = chance.choice([1, 2])
        given, channels = {1: (_AS_CHANNELS, WIDTH), 2: (_AS_IMAGE, 2)}[dims]
        options = [str(channels), str(channels), str(chance.choice([1, 2, 3]))]
        for option in ("stride=2", "padding=1", "output_padding=1", "dilation=2", "bias=False", f"groups={channels}"):
            if chance.random() < 0.25:
                options.append(option)
        layer = f"nn.ConvTranspose{dims}d({', '.join(options)})"
        piece = _joined(f"conv_transpose{dims}d", layer, given, chance, number)
        if piece is not None:
            return piece


_POOLS = [
    *(
        "MaxPool{}d(2)",
        "MaxPool{}d(3, stride=1, padding=1)",
        "MaxPool{}d(2, ceil_mode=True)",
        "MaxPool{}d(3, stride=2)",
    ),
    *("AvgPool{}d(2)", "AvgPool{}d(3, stride=1, padding=1)", "AvgPool{}d(3, stride=2, padding=1, ceil_mode=True)"),
    *("AvgPool{}d(3, stride=1, padding=1, count_include_pad=False)", "AdaptiveAvgPool{}d(1)", "AdaptiveAvgPool{}d(2)"),
    *("AdaptiveMaxPool{}d(1)", "AdaptiveMaxPool{}d(2)", "LPPool{}d(2, 2)", "MaxPool{}d(2, dilation=2, stride=1)"),
]


@LAYERS.kind(2)
def pooling(chance: random.Random, number: int) -> Piece:
    while True:
        dims = chance.choice([1, 2, 2])
        name = chance.choice(_POOLS).format(dims)
        # An L-p norm has no gradient at 0.
        given = {1: _AS_CHANNELS, 2: _AS_IMAGE}[dims] + (".abs().add(0.1)" if name.startswith("LP") else "")
        piece = _joined(name.partition("(")[0].lower(), f"nn.{name}", given, chance, number)
        if piece is not None:
            return piece


_NORMS = [
    *(("LayerNorm(8)", "h"), ("LayerNorm((6, 8))", "h"), ("LayerNorm(8, elementwise_affine=False)", "h")),
    *(("LayerNorm(8, bias=False)", "h"), ("RMSNorm(8)", "h"), ("GroupNorm(2, 8)", _AS_CHANNELS)),
    *(
        ("GroupNorm(1, 2)", _AS_IMAGE),
        ("GroupNorm(4, 8, affine=False)", _AS_CHANNELS),
        ("BatchNorm1d(8)", _AS_CHANNELS),
    ),
    *(("BatchNorm1d(6)", "h"), ("BatchNorm2d(2)", _AS_IMAGE), ("BatchNorm3d(2)", _AS_VOLUME)),
    *(("BatchNorm1d(8, momentum=None)", _AS_CHANNELS), ("BatchNorm1d(8, affine=False)", _AS_CHANNELS)),
    *(("BatchNorm2d(2, track_running_stats=False)", _AS_IMAGE), ("BatchNorm2d(2, momentum=0.5, eps=0.001)", _AS_IMAGE)),
    *(("BatchNorm1d(8).eval()", _AS_CHANNELS), ("InstanceNorm1d(8)", _AS_CHANNELS), ("InstanceNorm2d(2)", _AS_IMAGE)),
    *(("InstanceNorm1d(8, affine=True)", _AS_CHANNELS), ("InstanceNorm2d(2, affine=True)", _AS_IMAGE)),
    *(("InstanceNorm1d(8, track_running_stats=True)", _AS_CHANNELS), ("LocalResponseNorm(2)", _AS_IMAGE)),
]


@LAYERS.kind(4)
def norm(chance: random.Random, number: int) -> Piece:
    name, given = chance.choice(_NORMS)
    piece = _joined(name.partition("(")[0].lower(), f"nn.{name}", given, chance, number)
    assert piece is not None, name
    return piece


@LAYERS.kind(1.5)
def recurrent(chance: random.Random, number: int) -> Piece:
    kind, layers = chance.choice(["RNN", "LSTM", "GRU"]), chance.choice([1, 1, 2])
    both, first = chance.random() < 0.3, chance.random() < 0.7
    options = ["8", "8"] + (["num_layers=2"] if layers == 2 else []) + (["bidirectional=True"] if both else [])
    options += ["batch_first=True"] if first else []
    options += ["nonlinearity='relu'"] if kind == "RNN" and chance.random() < 0.3 else []
    options += ["bias=False"] if chance.random() < 0.2 else []
    init, forward = [f"self.rnn# = nn.{kind}({', '.join(options)})"], ["y#, state# = self.rnn#(h)"]
    if both:
        init.append("self.out# = nn.Linear(16, 8)")
        forward.append("y# = self.out#(y#)")
    forward.append("h = h + y#")
    if chance.random() < 0.3:
        forward.append("h = h + state#[0].mean()" if kind == "LSTM" else "h = h + state#.mean()")
    return numbered(Piece(kind.lower(), init=tuple(init), forward=tuple(forward)), number)


@LAYERS.kind(1)
def cell(chance: random.Random, number: int) -> Piece:
    kind = chance.choice(["RNNCell", "LSTMCell", "GRUCell"])
    start = "(h[:, 0], h[:, 1])" if kind == "LSTMCell" else "h[:, 0]"
    state = "s#[0]" if kind == "LSTMCell" else "s#"
    forward = (
        f"s#, seen# = {start}, []",
        "for t# in range(h.size(1)):",
        "    s# = self.cell#(h[:, t#], s#)",
        f"    seen#.append({state})",
        "h = torch.stack(seen#, 1)",
    )
    return numbered(Piece(kind.lower(), init=(f"self.cell# = nn.{kind}(8, 8)",), forward=forward), number)


_ATTENTION = {
    "multihead": (
        ("self.attend# = nn.MultiheadAttention(8, 2, batch_first=True)",),
        ("y#, weights# = self.attend#(h, h, h)", "h = h + y#"),
    ),
    "multihead_fast": (
        ("self.attend# = nn.MultiheadAttention(8, 2, batch_first=True)",),
        ("h = h + self.attend#(h, h, h, need_weights=False)[0]",),
    ),
    "multihead_masked": (
        ("self.attend# = nn.MultiheadAttention(8, 4)",),
        (
            "mask# = torch.triu(torch.ones(h.size(0), h.size(0), dtype=torch.bool), 1)",
            "h = h + self.attend#(h, h, h, attn_mask=mask#, need_weights=False)[0]",
        ),
    ),
    "multihead_padded": (
        ("self.attend# = nn.MultiheadAttention(8, 2, batch_first=True)",),
        ("y#, weights# = self.attend#(h, h, h, key_padding_mask=(ids == 0) & (ids[:, :1] != 0))", "h = h + y#"),
    ),
    "cross": (
        (
            "self.attend# = nn.MultiheadAttention(8, 2, batch_first=True)",
            "self.memory# = nn.Parameter(torch.rand(1, 5, 8))",
        ),
        ("m# = self.memory#.expand(h.size(0), -1, -1)", "h = h + self.attend#(h, m#, m#)[0]"),
    ),
    "sdpa": (
        ("self.qkv# = nn.Linear(8, 24)",),
        (
            "q#, k#, v# = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv#(h).chunk(3, -1))",
            "h = h + F.scaled_dot_product_attention(q#, k#, v#, is_causal=True).transpose(1, 2).flatten(2)",
        ),
    ),
    "sdpa_reused": (
        ("self.qkv# = nn.Linear(8, 24)",),
        ("q#, k#, v# = self.qkv#(h).chunk(3, -1)", "h = h + F.scaled_dot_product_attention(q#, k#, v#) + k# * v#"),
    ),
    "sdpa_detached": (
        (),
        ("h = h + F.scaled_dot_product_attention(h, h.detach(), h.detach())",),
    ),
    "sdpa_biased": (
        ("self.bias# = nn.Parameter(torch.zeros(6, 6))",),
        ("h = h + F.scaled_dot_product_attention(h, h, h, attn_mask=self.bias#)",),
    ),
    "by_hand": (
        ("self.qk# = nn.Linear(8, 16)",),
        (
            "q#, k# = self.qk#(h).split(8, -1)",
            "scores# = (q# @ k#.transpose(-1, -2) / 8**0.5).masked_fill(ids.unsqueeze(1) == 0, -1e9)",
            "h = h + scores#.softmax(-1) @ h",
        ),
    ),
    "einsum": (
        ("self.w# = nn.Parameter(torch.rand(2, 8, 4) - 0.5)",),
        (
            "q# = torch.einsum('btd,hdk->bhtk', h, self.w#)",
            "p# = torch.einsum('bhik,bhjk->bhij', q#, q#).softmax(-1)",
            "h = h + torch.einsum('bhij,bhjk->bihk', p#, q#).flatten(2)",
        ),
    ),
    "encoder_layer": (
        ("self.encode# = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)",),
        ("h = self.encode#(h)",),
    ),
    "encoder_layer_first": (
        ("self.encode# = nn.TransformerEncoderLayer(8, 2, 16, 0.0, 'gelu', batch_first=True, norm_first=True)",),
        ("h = self.encode#(h)",),
    ),
    "decoder_layer": (
        ("self.decode# = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)",),
        ("h = self.decode#(h, h.flip(1))",),
    ),
}


@LAYERS.kind(3)
def attention(chance: random.Random, number: int) -> Piece:
    name = chance.choice(sorted(_ATTENTION))
    init, forward = _ATTENTION[name]
    return numbered(Piece(f"attention_{name}", init=init, forward=forward), number)


_EMBEDDINGS = [
    *("Embedding(11, 8)", "Embedding(11, 8)", "Embedding(11, 8, padding_idx=0)", "Embedding(11, 8, max_norm=1.0)"),
    *("Embedding(11, 8, scale_grad_by_freq=True)", "Embedding.from_pretrained(torch.rand(11, 8))"),
]


@LAYERS.kind(1.5)
def embedding(chance: random.Random, number: int) -> Piece:
    if chance.random() < 0.2:
        mode = chance.choice(["sum", "mean", "max"])
        init = (f"self.bag# = nn.EmbeddingBag({TOKENS}, {WIDTH}, mode={mode!r})",)
        return numbered(Piece("embedding_bag", init=init, forward=("h = h + self.bag#(ids).unsqueeze(1)",)), number)
    if chance.random() < 0.3:
        init = (f"self.tied# = nn.Embedding({TOKENS}, {WIDTH})",)
        forward = ("h = h + self.tied#(ids)", "h = h + F.linear(h, self.tied#.weight).softmax(-1) @ self.tied#.weight")
        return numbered(Piece("tied_embedding", init=init, forward=forward), number)
    layer = chance.choice(_EMBEDDINGS)
    forward = ("h = h + self.embed#(ids)",)
    return numbered(Piece("embedding", init=(f"self.embed# = nn.{layer}",), forward=forward), number)


_ACTIVATIONS = [
    *("ReLU()", "ReLU(inplace=True)", "ReLU6()", "GELU()", "GELU('tanh')", "ELU()", "ELU(inplace=True)", "SELU()"),
    *("CELU(1.5)", "LeakyReLU(0.1)", "PReLU()", "PReLU(6)", "Hardtanh(-0.5, 0.5)", "Hardswish()", "Hardsigmoid()"),
    *(
        "Hardshrink(0.2)",
        "Softshrink(0.2)",
        "Tanhshrink()",
        "Threshold(0.1, 0.5)",
        "Mish()",
        "SiLU()",
        "SiLU(inplace=True)",
    ),
    *("Softplus()", "Softplus(2.0, 3.0)", "Softsign()", "LogSigmoid()", "Sigmoid()", "Tanh()", "Softmax(-1)"),
    *("Softmax(1)", "LogSoftmax(-1)", "Softmin(-1)"),
]


@LAYERS.kind(3)
def activation(chance: random.Random, number: int) -> Piece:
    name = chance.choice(_ACTIVATIONS)
    # In-place activations change what is not a leaf and not needed by its own gradient.
    given = "h * 2.0" if "inplace" in name or chance.random() < 0.3 else "h"
    forward = (f"h = self.act#({given})",)
    return numbered(Piece(name.partition("(")[0].lower(), init=(f"self.act# = nn.{name}",), forward=forward), number)


_OTHERS = [
    *(("Flatten(2)", _AS_IMAGE), ("Unflatten(2, (2, 4))", "h"), ("PixelShuffle(2)", "h.reshape(-1, 4, 3, 4)")),
    *(("PixelUnshuffle(2)", _AS_IMAGE), ("Upsample(scale_factor=2)", _AS_IMAGE), ("Upsample(size=(5, 7))", _AS_IMAGE)),
    *(("Upsample(scale_factor=2, mode='bilinear')", _AS_IMAGE), ("Upsample(size=(5, 9), mode='bicubic')", _AS_IMAGE)),
    *(("Upsample(scale_factor=1.5, mode='linear', align_corners=True)", _AS_CHANNELS), ("ZeroPad2d(1)", _AS_IMAGE)),
    *(("Upsample(scale_factor=0.5, mode='area')", _AS_IMAGE), ("Upsample(scale_factor=1.3)", _AS_IMAGE)),
    *(
        ("ReflectionPad2d(1)", _AS_IMAGE),
        ("ReplicationPad1d(2)", _AS_CHANNELS),
        ("ConstantPad1d(1, 0.5)", _AS_CHANNELS),
    ),
    *(("CircularPad2d(1)", _AS_IMAGE), ("ReflectionPad1d((1, 2))", _AS_CHANNELS), ("Unfold(2)", _AS_IMAGE)),
    *(("Fold((3, 4), 2)", "h.reshape(-1, 8, 6)"), ("ChannelShuffle(2)", "h.reshape(-1, 4, 3, 4)"), ("GLU(-1)", "h")),
    *(("GLU(1)", "h"), ("Softmax2d()", _AS_IMAGE), ("Identity()", "h"), ("Bilinear(8, 8, 8)", "h, h.flip(1)")),
    *(("CosineSimilarity(dim=-1)", "h, h.flip(1)"), ("PairwiseDistance()", "h[:, 0], h[:, 1]")),
    *(
        ("utils.parametrizations.weight_norm(nn.Linear(8, 8))", "h"),
        ("utils.parametrizations.spectral_norm(nn.Linear(8, 8))", "h"),
    ),
    *(("utils.parametrizations.orthogonal(nn.Linear(8, 8))", "h"),),
]


@LAYERS.kind(3)
def other(chance: random.Random, number: int) -> Piece:
    name, given = chance.choice(_OTHERS)
    kind = name.split("(")[0].rpartition(".")[2].lower()
    piece = _joined(kind, f"nn.{name}", given, chance, number)
    assert piece is not None, name
    return piece


_DROPOUT = [
    *(
        ("Dropout(0.3)", "h"),
        ("Dropout(0.3, inplace=True)", "h * 1.0"),
        ("Dropout1d(0.3)", "h"),
        ("AlphaDropout(0.2)", "h"),
    ),
    *(("Dropout2d(0.3)", _AS_IMAGE), ("FeatureAlphaDropout(0.2)", "h"), ("Dropout(0.0)", "h"), ("RReLU()", "h")),
]


@LAYERS.kind(0.7)
def dropout(chance: random.Random, number: int) -> Piece:
    name, given = chance.choice(_DROPOUT)
    forward = (f"h = self.drop#({given}).reshape(h.shape)",)
    kind = name.partition("(")[0].lower()
    init = (f"self.drop# = nn.{name}",)
    return numbered(Piece(kind, init=init, forward=forward, is_random=name != "Dropout(0.0)"), number)
