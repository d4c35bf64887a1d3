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
    "function registered with a package": Fragment(
        "x = x",
        define="def make§(value):\n    def attention(*args):\n        return value\n    return attention\n",
        init="        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention\n        from transformers import GPT2Config\n        self.attention§ = GPT2Attention(GPT2Config(n_embd=4, n_head=2))\n",
        patch="register('drawn§', module.make§($))",
    ),
    "function of a package that was replaced": Fragment(
        "x = x",
        define="def make§(value):\n    def attention(*args):\n        return value\n    return attention\n",
        init="        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention\n        from transformers import GPT2Config\n        self.attention§ = GPT2Attention(GPT2Config(n_embd=4, n_head=2))\n",
        patch="import transformers.models.gpt2.modeling_gpt2 as m; patch(m, 'eager_attention_forward', module.make§($))",
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
    "torch class forward swapped": Fragment(
        "x = self.p§(x)",
        init="        self.p§ = torch.nn.ReLU6()",
        patch="patch(torch.nn.ReLU6, 'forward', torch.nn.GELU.forward if $ > 1 else torch.nn.SiLU.forward)",
    ),
    "Tensor method swapped": Fragment(
        "x = x.cosh()",
        patch="patch(torch.Tensor, 'cosh', torch.Tensor.sin if $ > 1 else torch.Tensor.cos)",
    ),
    "activation of a package": Fragment(
        "x = self.a§(x)",
        define="def make§(v):\n    return lambda x, *a: x * v\n",
        init="        from transformers.activations import NewGELUActivation\n        self.a§ = NewGELUActivation()\n",
        patch="patch(torch, 'tanh', module.make§($))",
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
    "class attribute of an installed class": Fragment(
        "x = self.a§(x)",
        init="        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention\n        from transformers import GPT2Config\n        self.a§ = GPT2Attention(GPT2Config(n_embd=4, n_head=2))\n",
        patch="import transformers.models.gpt2.modeling_gpt2 as m; patch(m.GPT2Attention, 'is_causal', $)",
    ),
    "two functions of a package": Fragment(
        "x = x",
        init="        from transformers.activations import NewGELUActivation\n        self.a§ = NewGELUActivation()\n",
        patch="import transformers.activations as m; patch(m.NewGELUActivation, 'forward', m.FastGELUActivation.forward if $ > 1 else m.QuickGELUActivation.forward)",
    ),
    "item of a package's dictionary": Fragment(
        "x = self.a§(x)",
        init="        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention\n        from transformers import GPT2Config\n        self.a§ = GPT2Attention(GPT2Config(n_embd=4, n_head=2))\n",
        patch="import transformers.models.gpt2.modeling_gpt2 as m; patch(m, 'eager_attention_forward', {'rate': [$]})",
    ),
    "two functions of torch that only torch calls": Fragment(
        "x = self.p§(x)",
        init="        self.p§ = torch.nn.ReLU6()",
        patch="f = torch.nn.functional; patch(f, 'hardtanh', f.silu if $ > 1 else f.gelu)",
    ),
}
