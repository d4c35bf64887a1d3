"""What a program may replace or set in torch, in packages and in Python, each as a piece of a program."""

# ruff: noqa: E501
from __future__ import annotations

from tests.ort.ways_of_reading import Fragment

WAYS = {
    "replaced function of torch": Fragment(
        "x = torch.nn.functional.relu6(x)",
        define="def make§(value):\n    return lambda x: x * value\n",
        patch="patch(torch.nn.functional, 'relu6', module.make§($))",
    ),
    "replaced method of torch.Tensor": Fragment(
        "x = x.cosh()",
        define="def make§(value):\n    return lambda x: x * value\n",
        patch="patch(torch.Tensor, 'cosh', module.make§($))",
    ),
    "hf config class attribute": Fragment(
        "x = x * self.c§.rate",
        define="from transformers import GPT2Config as Config§",
        init="        self.c§ = Config§()",
        patch="patch(module.Config§, 'rate', $)",
    ),
    "attribute of torch.nn.Module": Fragment(
        "x = x * self.rate§",
        patch="patch(torch.nn.Module, 'rate§', $)",
    ),
    "attribute of nn.Linear": Fragment(
        "x = x * self.linear.rate§",
        patch="patch(torch.nn.Linear, 'rate§', $)",
    ),
    "attribute of torch.Tensor": Fragment(
        "x = x * x.rate§",
        patch="patch(torch.Tensor, 'rate§', $)",
    ),
    "attribute of the torch module": Fragment(
        "x = x * torch.rate§",
        patch="patch(torch, 'rate§', $)",
    ),
    "property of nn.Linear": Fragment(
        "x = x * self.linear.rate§",
        define="def make§(v):\n    return property(lambda self: v)\n",
        patch="patch(torch.nn.Linear, 'rate§', module.make§($))",
    ),
    "builtins name": Fragment(
        "x = x * rate§",
        patch="import builtins; patch(builtins, 'rate§', $)",
    ),
    "replaced builtin": Fragment(
        "x = x * divmod(3, 1)[0]",
        define="def make§(v):\n    return lambda *a: (v,)\n",
        patch="import builtins; patch(builtins, 'divmod', module.make§($))",
    ),
    "torch function swapped": Fragment(
        "x = torch.nn.functional.relu6(x)",
        patch="patch(torch.nn.functional, 'relu6', torch.nn.functional.gelu if $ > 1 else torch.nn.functional.silu)",
    ),
    "torch builtin swapped": Fragment(
        "x = torch.tanh(x)",
        patch="patch(torch, 'tanh', torch.sigmoid if $ > 1 else torch.cos)",
    ),
    "torch function in a torch module": Fragment(
        "x = self.p§(x)",
        define="def make§(v):\n    return lambda x, *a: x * v\n",
        init="        self.p§ = torch.nn.ReLU6()",
        patch="patch(torch.nn.functional, 'hardtanh', module.make§($))",
    ),
    "torch partial": Fragment(
        "x = torch.nn.functional.relu6(x)",
        define="import functools",
        patch="patch(torch.nn.functional, 'relu6', module.functools.partial(torch.nn.functional.leaky_relu, negative_slope=$))",
    ),
    "Tensor method swapped": Fragment(
        "x = x.cosh()",
        patch="patch(torch.Tensor, 'cosh', torch.Tensor.sin if $ > 1 else torch.Tensor.cos)",
    ),
    "warnings": Fragment(
        "import warnings; x = x * warnings.rate§",
        patch="import warnings; patch(warnings, 'rate§', $)",
    ),
    "package's module only": Fragment(
        "x = x * omegaconf.drawn§",
        define="import omegaconf",
        patch="patch(module.omegaconf, 'drawn§', $)",
    ),
}
