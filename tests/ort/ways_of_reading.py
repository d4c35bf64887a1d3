"""The ways in which Python code reads a value, each as a piece of a program, for the tests of the cache's key."""

# ruff: noqa: E501
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fragment:
    """One way to read a value. ``§`` stands for the fragment's number, ``$`` for the value."""

    forward: str
    """Statements of the model's forward."""
    define: str = ""
    """Statements of the module, before the class."""
    init: str = ""
    members: str = ""
    helper: str = ""
    """Statements of another module."""
    patch: str = ""
    """Statements that a program runs after the model was built."""


WAYS = {
    "global": Fragment("x = x * G§", patch="module.G§ = $"),
    "global of a function": Fragment("x = f§(x)", "def f§(x):\n    return x * G§\n", patch="module.G§ = $"),
    "item of a global": Fragment("x = x * T§['a'][0]", "T§ = {'a': [1.0]}", patch="module.T§['a'][0] = $"),
    "tensor of a global": Fragment("x = x * T§", "T§ = torch.ones(2)", patch="module.T§.fill_($)"),
    "closure": Fragment("x = f§(x)", "def make§(value):\n    return lambda x: x * value\n", patch="module.f§ = module.make§($)"),
    "closure of a local class": Fragment(
        "x = self.part§(x)",
        "def make§(value):\n    class Part(torch.nn.Module):\n        def forward(self, x):\n            return x * value\n"
        "    return Part()\n",
        "        self.part§ = torch.nn.Identity()",
        patch="model.part§ = module.make§($)",
    ),
    "closure of a decorator": Fragment(
        "x = f§(x)",
        "def scaled§(value):\n    def wrap(function):\n        @functools.wraps(function)\n        def call(x):\n"
        "            return function(x) * value\n        return call\n    return wrap\ndef plain§(x):\n    return x\n",
        patch="module.f§ = module.scaled§($)(module.plain§)",
    ),
    "default": Fragment("x = f§(x)", "def f§(x, factor=1.0):\n    return x * factor\n", patch="module.f§.__defaults__ = ($,)"),
    "keyword default": Fragment(
        "x = f§(x)", "def f§(x, *, factor=1.0):\n    return x * factor\n", patch="module.f§.__kwdefaults__ = {'factor': $}"
    ),
    "attribute of a function": Fragment("x = x * f§.factor", "def f§():\n    pass\n", patch="module.f§.factor = $"),
    "partial": Fragment(
        "x = f§(x)",
        "def scale§(x, factor):\n    return x * factor\n",
        patch="module.f§ = module.functools.partial(module.scale§, factor=$)",
    ),
    "one of two functions of a line": Fragment(
        "x = f§(x)", "F§ = [lambda x: x * 2, lambda x: x * 3]\n", patch="module.f§ = module.F§[int($ > 1)]"
    ),
    "class attribute": Fragment("x = x * self.C§", members="    C§ = 1.0\n", patch="module.Net.C§ = $"),
    "class attribute of a base": Fragment(
        "x = self.part§(x)",
        "class Base§(torch.nn.Module):\n    C§ = 1.0\nclass Part§(Base§):\n    def forward(self, x):\n        return x * self.C§\n",
        "        self.part§ = Part§()",
        patch="module.Base§.C§ = $",
    ),
    "property": Fragment(
        "x = x * self.p§", members="    @property\n    def p§(self):\n        return G§\n", patch="module.G§ = $"
    ),
    "cached property": Fragment(
        "x = x * self.p§",
        members="    @functools.cached_property\n    def p§(self):\n        return G§\n",
        patch="module.G§ = $",
    ),
    "static method": Fragment(
        "x = self.s§(x)", members="    @staticmethod\n    def s§(x):\n        return x * G§\n", patch="module.G§ = $"
    ),
    "class method": Fragment(
        "x = self.c§(x)", members="    @classmethod\n    def c§(cls, x):\n        return x * cls.C§\n    C§ = 1.0\n",
        patch="module.Net.C§ = $",
    ),
    "replaced method": Fragment(
        "x = self.m§(x)",
        "def other§(self, x):\n    return x * 3\n",
        members="    def m§(self, x):\n        return x * 2\n",
        patch="module.Net.m§ = module.other§ if $ > 1 else module.Net.m§",
    ),
    "operator of an object": Fragment(
        "x = O§ + x",
        "class Op§:\n    def __add__(self, x):\n        return x * G§\nO§ = Op§()\n",
        patch="module.G§ = $",
    ),
    "callable object": Fragment(
        "x = O§(x)",
        "class Op§:\n    def __init__(self):\n        self.factor = 1.0\n    def __call__(self, x):\n        return x * self.factor\n"
        "O§ = Op§()\n",
        patch="module.O§.factor = $",
    ),
    "configuration object": Fragment(
        "x = x * self.cfg§.rate",
        "@dataclass\nclass Cfg§:\n    rate: float = 1.0\n",
        "        self.cfg§ = Cfg§()",
        patch="model.cfg§.rate = $",
    ),
    "method of a configuration object": Fragment(
        "x = x * self.cfg§.rate()",
        "class Cfg§:\n    __slots__ = ('value',)\n    def rate(self):\n        return self.value * G§\n",
        "        self.cfg§ = Cfg§()\n        self.cfg§.value = 1.0",
        patch="module.G§ = $",
    ),
    "object that is made": Fragment(
        "x = x * Made§().value",
        "class Made§:\n    def __init__(self):\n        self.value = G§\n",
        patch="module.G§ = $",
    ),
    "enumeration": Fragment("x = x * E§.value", "class Kind§(enum.Enum):\n    A = 1.0\n    B = 3.0\n",
                            patch="module.E§ = module.Kind§.B if $ > 1 else module.Kind§.A"),
    "name made at run time": Fragment("x = x * getattr(self, 'C' + '§')", members="    C§ = 1.0\n", patch="module.Net.C§ = $"),
    "global of another module": Fragment("x = x * drawn_helper.H§", helper="H§ = 1.0\n", patch="helper.H§ = $"),
    "function of another module": Fragment(
        "x = drawn_helper.h§(x)", helper="H§ = 1.0\ndef h§(x):\n    return x * H§\n", patch="helper.H§ = $"
    ),
    "module imported in a function": Fragment(
        "import drawn_helper as inner; x = x * inner.H§", helper="H§ = 1.0\n", patch="helper.H§ = $"
    ),
    "function under no_grad": Fragment(
        "x = x + f§(x)",
        "@torch.no_grad()\ndef f§(x):\n    return x * G§\n",
        patch="module.G§ = $",
    ),
    "nested function": Fragment(
        "x = (lambda y: y * G§)(x)", patch="module.G§ = $"
    ),
    "hook": Fragment(
        "pass",
        "def make§(value):\n    return lambda module, inputs, output: output * value\n",
        patch="model.linear.register_forward_hook(module.make§($))",
    ),
    "lambda in dict": Fragment(
        "x = D§['a'](x)",
        define="D§ = {'a': lambda x, f=1.0: x * f}",
        patch="module.D§['a'] = lambda x, f=$: x * f",
    ),
    "bound method of another object": Fragment(
        "x = f§(x)",
        define="class S§:\n    def __init__(self, v):\n        self.v = v\n    def go(self, x):\n        return x * self.v\n",
        patch="module.f§ = module.S§($).go",
    ),
    "bound builtin method": Fragment(
        "x = x * f§('a')",
        patch="module.f§ = {'a': $}.get",
    ),
    "bound builtin of a tensor": Fragment(
        "x = f§(x)",
        patch="module.f§ = torch.full((2,), $).mul",
    ),
    "enum member's method": Fragment(
        "x = x * E§.A.rate()",
        define="class E§(enum.Enum):\n    A = 1.0\n    def rate(self):\n        return G§\n",
        patch="module.G§ = $",
    ),
    "enum member attribute": Fragment(
        "x = x * E§.A.extra",
        define="class E§(enum.Enum):\n    A = 1.0\n",
        patch="module.E§.A.extra = $",
    ),
    "enum with own repr": Fragment(
        "x = x * K§.value",
        define="class E§(enum.Enum):\n    A = 1.0\n    B = 3.0\n    def __repr__(self):\n        return 'E'\n",
        patch="module.K§ = module.E§($)",
    ),
    "float subclass attr": Fragment(
        "x = x * R§.twice()",
        define="class Rate§(float):\n    def twice(self):\n        return self * G§\nR§ = Rate§(1.0)\n",
        patch="module.G§ = $",
    ),
    "str subclass attr": Fragment(
        "x = x * R§.factor",
        define="class S§(str):\n    pass\nR§ = S§('a')\n",
        patch="module.R§.factor = $",
    ),
    "module getattr": Fragment(
        "x = x * drawn_helper.H§",
        helper="VALUES§ = {'H§': 1.0}\ndef __getattr__(name):\n    if name in VALUES§:\n        return VALUES§[name]\n    raise AttributeError(name)\n",
        patch="helper.VALUES§['H§'] = $",
    ),
    "module class": Fragment(
        "x = x * drawn_helper.H§",
        helper="import types\nV§ = 1.0\nclass M§(types.ModuleType):\n    @property\n    def H§(self):\n        return V§\n__import__('sys').modules[__name__].__class__ = M§\n",
        patch="helper.V§ = $",
    ),
    "metaclass property": Fragment(
        "x = x * C§.rate",
        define="class Meta§(type):\n    @property\n    def rate(cls):\n        return G§\nclass C§(metaclass=Meta§):\n    pass\n",
        patch="module.G§ = $",
    ),
    "metaclass attribute": Fragment(
        "x = x * C§.rate",
        define="class Meta§(type):\n    rate = 1.0\nclass C§(metaclass=Meta§):\n    pass\n",
        patch="module.Meta§.rate = $",
    ),
    "metaclass of the model": Fragment(
        "x = x * type(self.p§).rate",
        define="class Meta§(type):\n    @property\n    def rate(cls):\n        return G§\nclass C§(torch.nn.Identity, metaclass=Meta§):\n    pass\n",
        init="        self.p§ = C§()",
        patch="module.G§ = $",
    ),
    "ndarray": Fragment(
        "x = x * torch.from_numpy(A§)",
        define="import numpy\nA§ = numpy.ones(2, dtype='float32')",
        patch="module.A§[0] = $",
    ),
    "tensor attribute": Fragment(
        "x = x * T§.factor",
        define="T§ = torch.ones(2)\n",
        patch="module.T§.factor = $",
    ),
    "parameter attribute": Fragment(
        "x = x * self.linear.weight.factor§",
        patch="model.linear.weight.factor§ = $",
    ),
    "buffer attribute": Fragment(
        "x = x * self.b§.factor",
        init="        self.register_buffer('b§', torch.ones(2))",
        patch="model.b§.factor = $",
    ),
    "parameter strides": Fragment(
        "x = x * self.linear.weight.stride()[0]",
        patch="model.linear.weight = torch.nn.Parameter(torch.ones(2,2).t() if $ > 1 else torch.ones(2,2))",
    ),
    "defaultdict factory": Fragment(
        "x = x * D§['q']",
        define="import collections\n",
        patch="module.D§ = module.collections.defaultdict(lambda v=$: v)",
    ),
    "deque subclass": Fragment(
        "x = x * D§[0]",
        define="import collections\nclass Q§(collections.deque):\n    pass\nD§ = Q§([1.0])\n",
        patch="module.D§[0] = $",
    ),
    "namespace": Fragment(
        "x = x * N§.rate",
        define="import types\nN§ = types.SimpleNamespace(rate=1.0)",
        patch="module.N§.rate = $",
    ),
    "omegaconf": Fragment(
        "x = x * N§.a.rate",
        define="from omegaconf import OmegaConf\nN§ = OmegaConf.create({'a': {'rate': 1.0}})",
        patch="module.N§.a.rate = $",
    ),
    "omegaconf interpolation": Fragment(
        "x = x * N§.b",
        define="from omegaconf import OmegaConf\nN§ = OmegaConf.create({'a': 1.0, 'b': '${a}'})",
        patch="module.N§.a = $",
    ),
    "hf config": Fragment(
        "x = x * self.c§.rate",
        define="from transformers import GPT2Config as Config§",
        init="        self.c§ = Config§(rate=1.0)",
        patch="model.c§.rate = $",
    ),
    "instance forward": Fragment(
        "pass",
        define="def make§(v):\n    return lambda x: x * v\n",
        init="        self.p§ = torch.nn.Identity()\n",
        patch="model.p§.forward = module.make§($)",
    ),
    "match keyword": Fragment(
        "match O§:\n            case C§(rate=r):\n                x = x * r",
        define="class C§:\n    rate = 1.0\nO§ = C§()\n",
        patch="module.C§.rate = $",
    ),
    "match args": Fragment(
        "match O§:\n            case C§(r):\n                x = x * r",
        define="class C§:\n    __match_args__ = ('one',)\n    one = 1.0\n    two = 3.0\nO§ = C§()\n",
        patch="module.C§.__match_args__ = ('one',) if $ > 1 else ('two',)",
    ),
    "format string": Fragment(
        "x = x * float('{0.rate§}'.format(O§))",
        define="class C§:\n    rate§ = 1.0\nO§ = C§()\n",
        patch="module.C§.rate§ = $",
    ),
    "str of an object": Fragment(
        "x = x * float(str(O§))",
        define="class C§:\n    def __str__(self):\n        return str(G§)\nO§ = C§()\n",
        patch="module.G§ = $",
    ),
    "fstring of an object": Fragment(
        "x = x * float(f'{O§}')",
        define="class C§:\n    def __str__(self):\n        return repr(G§)\nO§ = C§()\n",
        patch="module.G§ = $",
    ),
    "doc": Fragment(
        "x = x * float(self.__doc__)",
        patch="module.Net.__doc__ = str($)",
    ),
    "annotations": Fragment(
        "x = x * self.__annotations__['a']",
        patch="module.Net.__annotations__ = {'a': $}",
    ),
    "dataclass metadata": Fragment(
        "import dataclasses; x = x * dataclasses.fields(O§)[0].metadata['f']",
        define="@dataclass\nclass C§:\n    a: float = field(default=1.0, metadata={'f': 1.0})\nO§ = C§()\n",
        patch="module.C§.__dataclass_fields__['a'].metadata = {'f': $}",
    ),
    "forward hook kwargs flag": Fragment(
        "pass",
        define="def h§(module, *a):\n    return a[-1] * len(a)\ndef k§(module, *a):\n    return a[-1]\n",
        patch="model.linear.register_forward_hook(module.h§, with_kwargs=$ > 1); model.linear.register_forward_hook(module.k§, with_kwargs=$ <= 1)",
    ),
    "lru_cache": Fragment(
        "x = x * f§()",
        define="@functools.lru_cache\ndef f§():\n    return G§\n",
        patch="module.G§ = $",
    ),
    "partialmethod": Fragment(
        "x = self.m§(x)",
        members="    def base§(self, x, f):\n        return x * f\n    m§ = functools.partialmethod(base§, f=1.0)\n",
        patch="module.Net.m§ = module.functools.partialmethod(module.Net.base§, f=$)",
    ),
    "descriptor": Fragment(
        "x = x * self.d§",
        define="class D§:\n    def __get__(self, o, t):\n        return G§\n",
        members="    d§ = D§()\n",
        patch="module.G§ = $",
    ),
    "getattr": Fragment(
        "x = x * self.p§.anything",
        define="class P§(torch.nn.Module):\n    def __getattr__(self, name):\n        return G§ if name == 'anything' else super().__getattr__(name)\n",
        init="        self.p§ = P§()",
        patch="module.G§ = $",
    ),
    "generator expression": Fragment(
        "x = x * sum(G§ for _ in range(2))",
        patch="module.G§ = $",
    ),
    "logger": Fragment(
        "x = x * L§.level",
        define="import logging\nL§ = logging.getLogger('drawn§')",
        patch="module.L§.setLevel(int($))",
    ),
    "autograd function": Fragment(
        "x = Fn§.apply(x)",
        define="class Fn§(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n    @staticmethod\n    def backward(ctx, g):\n        return g * G§\n",
        patch="module.G§ = $",
    ),
    "parametrization": Fragment(
        "pass",
        define="class P§(torch.nn.Module):\n    def forward(self, w):\n        return w * G§\n",
        patch="module.G§ = $; import torch.nn.utils.parametrize as p; p.register_parametrization(model.linear, 'weight', module.P§())",
    ),
    "closure over loop in list": Fragment(
        "for f in L§:\n            x = f(x)",
        define="L§ = []\n",
        patch="module.L§.append((lambda v: lambda x: x * v)($))",
    ),
    "class made by type()": Fragment(
        "x = self.p§(x)",
        define="def fwd§(self, x):\n    return x * self.C\n",
        init="        self.p§ = torch.nn.Identity()\n",
        patch="model.p§ = type('Made', (torch.nn.Module,), {'forward': module.fwd§, 'C': $, '__module__': 'drawn_model'})()",
    ),
    "submodule dict order": Fragment(
        "for k, m in self.d§.items():\n            x = m(x)",
        init="        self.d§ = torch.nn.ModuleDict({'a': torch.nn.ReLU(), 'b': torch.nn.Tanh()})",
        patch="model.d§ = torch.nn.ModuleDict({'b': torch.nn.Tanh(), 'a': torch.nn.ReLU()}) if $ > 1 else model.d§",
    ),
    "member of a set of texts": Fragment(
        "x = x * 2 if 'c3.0' in self.names§ else x",
        patch="model.names§ = {'a', 'bc', 'def', 'c' + repr($)}",
    ),
}  # fmt: skip
