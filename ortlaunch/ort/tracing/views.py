"""Exports changes of a tensor's memory that other tensors see, as in ``y = x.view(-1); y.mul_(2)``.

torch's exporter gives the tensor that is changed a new value, and leaves its other views, and what it is a view of, as
they were; it follows assignments to elements (``x[:, 0] = 1``) alone. The graph would compute with values of before the
change. So a traced graph with such a change is rewritten before it is exported: the change becomes an operator that
returns its result, the result is put into the tensor that it is a view of, and each later use of that memory takes its
view anew. Sizes stay those of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.operators.torch_nodes import torch_node
from ortlaunch.ort.operators.values import DTYPES, sizes
from ortlaunch.ort.source import location, place_in_stack, statement_at
from ortlaunch.ort.tracing.passes import CannotExportError, over_graphs

_LAST = 2**63 - 1
_RESHAPES = ("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze")
_OWN_INVERSES = ("t", "transpose", "swapaxes", "swapdims")
_IDENTITIES = ("alias", "contiguous", "dropout", "to", "type_as")
_LISTS = {"split": 2, "split_with_sizes": 2, "chunk": 2, "unbind": 1}
"""Operators that return a list of views, and the index of their dimension."""
_OF_SHAPES_ALONE = ("size", "dim", "numel", "is_floating_point")
_METADATA = ("squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "detach_")
"""Operators that make the tensor itself another view of its memory, and change no value."""
_ASSIGNS = ("copy_", "index_put_")
_ELEMENTS = ("select", "slice")


@torch_node("Tensor x, Tensor values", differentiable=(0,))
def _replaced(x: Tensor, values: Tensor) -> Tensor:
    """Returns other values with the gradient of the first ones, as after ``x.detach().clamp_(0)``."""
    return _Replaced.apply(x, values)  # type: ignore[no-any-return]


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


_REPLACED = f"ortlaunch::{_replaced.name}"


class _CannotFollowError(Exception):
    """A change cannot be exported."""


def register() -> None:
    """Registers the symbolic of an operator that the rewritten graphs have; repeated calls do nothing."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    register_custom_op_symbolic(_REPLACED, lambda g, x, values: _replaced(g, x, values, dims=sizes(x)), 17)


def followed() -> contextlib.AbstractContextManager[None]:
    """Rewrites each graph that is exported meanwhile.

    Raises:
        RequestError: a change cannot be exported; the message names its line.
    """
    return over_graphs(_follow)


def _follow(graph: Any) -> None:
    change = _Seeing().unseen_change(graph) or next(filter(_is_assignment, graph.nodes()), None)
    if change is not None:
        message = _message(change)
        try:
            _Rewriting(graph).run()
        except _CannotFollowError as error:
            raise CannotExportError(message) from error
    _copy_parts(graph)


def _copy_parts(graph: Any) -> None:
    """Copies a part of a tensor before ``index_put``; of a part, the exporter would return the whole tensor."""
    for node in list(graph.nodes()):
        part = node.inputsAt(0) if _name(node) == "index_put" else None
        if part is None or _name(part.node()) not in _ELEMENTS:
            continue
        as_it_is = graph.create("prim::Constant", [], 1)
        as_it_is.insertBefore(node)
        copy = graph.create("aten::clone", [part, as_it_is.output().setType(torch._C.NoneType.get())], 1)
        copy.insertBefore(node)
        copy.copyMetadata(node)
        node.replaceInput(0, copy.output().setType(part.type()))


def _message(change: Any) -> str:
    place = place_in_stack(change.sourceRange())
    where = f"`{statement_at(*place)}` at {location(place)}" if place else "forward"
    return (
        f"{where} changes memory that several tensors share, in a way that ONNX Runtime's graph cannot repeat: write "
        "it without a change in place (on a clone, or with torch.where), or use backend=eager or backend=compile"
    )


@dataclass(eq=False)
class _Memory:
    """Memory that several values of a graph share."""

    aliases: list[_Alias] = field(default_factory=list)
    changed: Any = None
    """The node that changed it last."""
    values: dict[_Signature, Any] = field(default_factory=dict)
    """The current values of its views."""


@dataclass(eq=False)
class _Alias:
    """A view of memory; the memory's first value is a view of itself."""

    memory: _Memory
    parent: _Alias | None = None
    node: Any = None
    """What makes it of its parent."""
    index: int | None = None
    """Which one, if `node` makes a list of views."""
    signature: _Signature = ()
    is_old: bool = False
    """The exporter would give it a value of before a change."""


_Signature = tuple[Any, ...]
"""How a view is made of the memory's first value; equal ones are the same elements."""


class _Aliases:
    """The values of a graph by the memory that they share, as far as its nodes were entered in order."""

    def __init__(self) -> None:
        self._of: dict[str, _Alias] = {}
        self._lists: dict[str, tuple[_Alias, Any]] = {}

    def get(self, value: Any) -> _Alias | None:
        return self._of.get(value.debugName())

    def take(self, value: Any) -> _Alias:
        """Returns the alias of a value, which is memory of its own if it is no known view."""
        alias = self.get(value)
        if alias is None:
            alias = _Alias(_Memory())
            alias.memory.values[()] = value
            self.add(value, alias)
        return alias

    def add(self, value: Any, alias: _Alias) -> None:
        self._of[value.debugName()] = alias
        if alias not in alias.memory.aliases:
            alias.memory.aliases.append(alias)

    def enter(self, node: Any) -> bool:
        """Adds the views that a node makes; returns whether it makes views."""
        name = _name(node)
        if name == "prim::ListUnpack":
            made = self._lists.get(next(node.inputs()).debugName())
            if made is None:
                return False
            for index, output in enumerate(node.outputs()):
                self._view(output, made[0], made[1], index)
            return True
        if name in _LISTS:
            self._lists[node.output().debugName()] = (self.take(next(node.inputs())), node)
            return True
        if not _is_view(node):
            return False
        self._view(node.output(), self.take(next(node.inputs())), node, None)
        return True

    def _view(self, output: Any, parent: _Alias, node: Any, index: int | None) -> None:
        arguments = tuple(_spelled(value) for value in list(node.inputs())[1:])
        signature = (*parent.signature, (_name(node), arguments, index))
        self.add(output, _Alias(parent.memory, parent, node, index, signature, parent.is_old))
        parent.memory.values[signature] = output


class _Seeing:
    """Finds whether the exporter would compute with a value of before a change in place."""

    def __init__(self) -> None:
        self._aliases = _Aliases()

    def unseen_change(self, graph: Any) -> Any | None:
        """Returns the change; None where there is none."""
        for node in [*graph.nodes(), graph.return_node()]:
            change = self._read_late(node)
            if change is not None:
                return change
            if not self._aliases.enter(node) and _changed_inputs(node):
                self._note(node)
        return None

    def _read_late(self, node: Any) -> Any | None:
        for inner in _inside(node):
            if any(self._aliases.get(inner.inputsAt(index)) for index in _changed_inputs(inner)):
                return inner
            late = self._read_late(inner)
            if late is not None:
                return late
        if _name(node) in (*_OF_SHAPES_ALONE, *_LISTS, "prim::ListUnpack") or _is_view(node):
            return None
        for index, value in enumerate(node.inputs()):
            alias = self._aliases.get(value)
            if alias is not None and alias.is_old and not (index == 0 and self._assigns_the_same(node, alias)):
                return alias.memory.changed
        return None

    def _assigns_the_same(self, node: Any, alias: _Alias) -> bool:
        """Whether a node assigns the result of the last change to its own place, as ``x[0] += 1`` ends."""
        last = alias.memory.changed
        if _name(node) != "copy_" or last is None or _name(last) in _ASSIGNS:
            return False
        source, changed = node.inputsAt(1), self._aliases.get(last.inputsAt(0))
        is_its_result = source.debugName() == last.output().debugName()
        return is_its_result and changed is not None and changed.signature == alias.signature

    def _note(self, node: Any) -> None:
        for index in _changed_inputs(node):
            alias = self._aliases.take(node.inputsAt(index))
            for other in alias.memory.aliases:
                other.is_old = True
            alias.memory.changed = node
            # torch's exporter follows an assignment to what the assigned elements are part of.
            is_followed = _name(node) in _ASSIGNS and all(step[0] in _ELEMENTS for step in alias.signature)
            # It takes a mask of a part for a mask of the whole.
            is_followed = is_followed and not (alias.signature and _has_mask(node))
            parent = alias.parent
            while parent is not None and is_followed:
                parent.is_old = False
                parent = parent.parent
            for output in node.outputs():
                # Its own signature, but a new value.
                self._aliases.add(
                    output, _Alias(alias.memory, alias.parent, alias.node, alias.index, alias.signature, is_old=False)
                )


class _Rewriting:
    """Rewrites all changes in place of a graph whose target may be a view or have one."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._aliases = _Aliases()
        self._at: Any = None
        """The node before which new ones are inserted."""

    def run(self) -> None:
        """Rewrites the graph.

        Raises:
            _CannotFollowError: a change cannot be expressed.
        """
        for node in list(self._graph.nodes()):
            self._at = node
            self._renew_inputs(node)
            if not self._aliases.enter(node) and _changed_inputs(node):
                self._change(node)
        self._at = self._graph.return_node()
        self._renew_inputs(self._at)

    def _renew_inputs(self, node: Any) -> None:
        for inner in _inside(node):
            if any(self._aliases.get(inner.inputsAt(index)) for index in _changed_inputs(inner)):
                raise _CannotFollowError
            self._renew_inputs(inner)
        for index, value in enumerate(list(node.inputs())):
            alias = self._aliases.get(value)
            if alias is not None and alias.memory.changed is not None:
                node.replaceInput(index, self._value(alias))

    def _value(self, alias: _Alias) -> Any:
        """Returns what a view is now."""
        values = alias.memory.values
        if alias.signature not in values:
            assert alias.parent is not None
            made = self._again(alias, self._value(alias.parent))
            if alias.index is not None:
                made = made[alias.index]
            values[alias.signature] = made
            self._aliases.add(made, alias)
        return values[alias.signature]

    def _again(self, alias: _Alias, parent: Any) -> Any:
        """Makes a view, or the list of views, of another value of its parent."""
        node = alias.node
        made = self._op(_kind(node).removesuffix("_"), parent, *list(node.inputs())[1:], like=node.output())
        if alias.index is None:
            return _as_differentiable(made, parent)
        views = next(use.user for use in node.output().uses() if use.user.kind() == "prim::ListUnpack")
        unpacked = self._graph.create("prim::ListUnpack", [made], views.outputsSize())
        unpacked.insertBefore(self._at)
        for new, old in zip(unpacked.outputs(), views.outputs(), strict=True):
            _as_differentiable(new.setType(old.type()), parent)
        return list(unpacked.outputs())

    def _change(self, node: Any) -> None:
        """Replaces a change in place by its result."""
        changed = [self._aliases.take(node.inputsAt(index)) for index in _changed_inputs(node)]
        is_own = all(alias.parent is None and len(alias.memory.aliases) == 1 for alias in changed)
        if is_own and not _is_assignment(node):
            # No other value shares the memory, so that torch's exporter follows the change.
            for alias, output in zip(changed, node.outputs(), strict=False):
                self._set(alias, output)
            return
        if _changed_inputs(node) != (0,) or node.outputsSize() != 1:
            raise _CannotFollowError
        alias, memory = changed[0], changed[0].memory
        path = []
        view = alias
        while view.parent is not None:
            path.append((view, self._value(view.parent)))
            view = view.parent
        is_the_same = _name(node) == "copy_" and node.inputsAt(1).debugName() == self._value(alias).debugName()
        if is_the_same:
            result = self._value(alias)
        else:
            result = self._result(node)
            memory.changed, memory.values = node, {}
            self._set(alias, result)
            whole = result
            for view, parent in path:
                whole = _as_differentiable(self._put(view, parent, whole).setType(parent.type()), parent, whole)
                assert view.parent is not None
                self._set(view.parent, whole)
        node.output().replaceAllUsesWith(result)
        node.destroy()

    def _set(self, alias: _Alias, value: Any) -> None:
        alias.memory.values[alias.signature] = value
        self._aliases.add(value, alias)

    def _result(self, node: Any) -> Any:
        target, *others = node.inputs()
        name, kind = _name(node), node.output().type()
        if name == "copy_":
            return self._assigned(target, others[0]).setType(kind)
        # If only the shape of what is overwritten were used, it would need no gradient, and ONNX Runtime 1.19.2 loses
        # the gradients of the other parts of the tensor.
        if name == "zero_":
            result = self._op("aten::masked_fill", target, self._true(), self._constant(0))
        elif name == "fill_":
            result = self._op("aten::masked_fill", target, self._true(), others[0])
        else:
            result = self._op(_functional(_kind(node)), target, *others)
        dtypes = {_dtype(value) for value in (target, *others)} - {None}
        if len(dtypes) > 1:
            result = self._op("aten::type_as", result, target)
        return result.setType(kind)

    def _assigned(self, target: Any, source: Any) -> Any:
        """Returns a source with the shape and the dtype of a target."""
        given, wanted = source.type(), target.type()
        if given.scalarType() != wanted.scalarType():
            source = self._op("aten::type_as", source, target).setType(given.with_dtype(DTYPES[wanted.scalarType()]))
        sizes = given.sizes()
        if sizes is not None and sizes == wanted.sizes() and 1 not in sizes:
            return self._op("aten::clone", source, self._constant(None))
        return self._op("aten::where", self._true(), source, target)

    def _put(self, view: _Alias, parent: Any, part: Any) -> Any:
        """Returns `parent` with `part` in the place of a view of it."""
        node, name = view.node, _name(view.node).removesuffix("_")
        arguments = list(node.inputs())[1:]
        if name in _LISTS:
            parts = self._again(view, parent)
            parts[view.index] = part
            return self._joined(parts, node.inputsAt(_LISTS[name]), "aten::stack" if name == "unbind" else "aten::cat")
        if name in _IDENTITIES:
            return part
        if name == "detach":
            # The values are new, and the gradient stays that of what was there before.
            is_plain = not (parent.requires_grad() or part.requires_grad())
            return part if is_plain else self._op(_REPLACED, parent, part)
        if name in _RESHAPES and _dtype(part) == _dtype(parent):
            return self._op("aten::reshape_as", part, parent)
        if name in _OWN_INVERSES or (name == "numpy_T" and _rank(parent) == 2):
            return self._op("aten::t" if name == "numpy_T" else f"aten::{name}", part, *arguments)
        if name == "permute":
            return self._op("aten::permute", part, self._list(_inverse(_numbers(arguments[0]))))
        if name == "diagonal":
            return self._op("aten::diagonal_scatter", parent, part, *arguments)
        if name == "select":
            index = arguments[1].toIValue()
            after = None if index is None else (index + 1) or _LAST
            row = self._op("aten::unsqueeze", part, arguments[0], like=parent)
            return self._spliced(parent, row, arguments[0], arguments[1], after)
        if name == "narrow":
            start, length = (one.toIValue() for one in arguments[1:])
            is_known = start is not None and start >= 0 and length is not None
            return self._spliced(parent, part, arguments[0], arguments[1], start + length if is_known else None)
        if name == "slice" and arguments[3].toIValue() == 1:
            return self._spliced(parent, part, arguments[0], arguments[1], _end_of_slice(*arguments[1:3]))
        if name == "slice":
            return self._op("aten::slice_scatter", parent, part, *arguments)
        raise _CannotFollowError

    def _spliced(self, parent: Any, part: Any, dim: Any, start: Any, after: int | None) -> Any:
        """Returns `parent` with `part` from `start` on; `after` is where the rest begins, None where that varies."""
        one, zero = self._constant(1), self._constant(0)
        start = zero if start.type().kind() == "NoneType" else start
        head = self._op("aten::slice", parent, dim, zero, start, one, like=parent)
        if after == _LAST:
            return self._joined([head, part], dim, "aten::cat")
        if after is not None:
            end = self._constant(after)
        else:
            sizes = [self._op("aten::size", value, dim).setType(torch._C.IntType.get()) for value in (head, part)]
            end = self._op("aten::add", *sizes).setType(torch._C.IntType.get())
        tail = self._op("aten::slice", parent, dim, end, self._constant(_LAST), one, like=parent)
        return self._joined([head, part, tail], dim, "aten::cat")

    def _joined(self, parts: Sequence[Any], dim: Any, kind: str) -> Any:
        listed = self._op("prim::ListConstruct", *parts).setType(torch._C.ListType.ofTensors())
        return self._op(kind, listed, dim)

    def _op(self, kind: str, *inputs: Any, like: Any = None) -> Any:
        node = self._graph.create(kind, list(inputs), 1)
        node.insertBefore(self._at)
        node.copyMetadata(self._at)
        return node.output() if like is None else node.output().setType(like.type())

    def _constant(self, value: int | None) -> Any:
        node = self._graph.create("prim::Constant", [], 1)
        node.insertBefore(self._at)
        if value is None:
            return node.output().setType(torch._C.NoneType.get())
        node.i_("value", value)
        return node.output().setType(torch._C.IntType.get())

    def _true(self) -> Any:
        node = self._graph.create("prim::Constant", [], 1)
        node.insertBefore(self._at)
        node.t_("value", torch.tensor(True))
        node.output().inferTypeFrom(torch.tensor(True))
        return node.output()

    def _list(self, numbers: Sequence[int]) -> Any:
        values = [self._constant(number) for number in numbers]
        return self._op("prim::ListConstruct", *values).setType(torch._C.ListType.ofInts())


def _kind(node: Any) -> str:
    kind: str = node.kind()
    return kind


def _name(node: Any) -> str:
    """Returns the name of an operator without ``aten::``."""
    return _kind(node).removeprefix("aten::")


def _inside(node: Any) -> Iterator[Any]:
    for block in node.blocks():
        yield from block.nodes()


@cache
def _schema(text: str) -> Any:
    return torch._C.parse_schema(text)


def _schema_of(node: Any) -> Any | None:
    if not _kind(node).startswith("aten::"):
        return None
    text = node.schema()
    return _schema(text) if text.startswith("aten::") else None


def _changed_inputs(node: Any) -> tuple[int, ...]:
    """Returns the indices of the inputs that a node changes in place."""
    schema = _schema_of(node)
    if schema is None or not schema.is_mutable or _name(node) in _METADATA:
        return ()
    return tuple(index for index, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write)


def _is_assignment(node: Any) -> bool:
    """Whether a node copies to a whole tensor, or what it copies is broadcast: the exporter follows neither."""
    if _name(node) != "copy_":
        return False
    target, source = node.inputsAt(0), node.inputsAt(1)
    return _name(target.node()) not in _ELEMENTS or target.type().sizes() != source.type().sizes()


def _has_mask(node: Any) -> bool:
    """Whether an assignment to elements chooses some by a mask."""
    if _name(node) != "index_put_":
        return False
    return any(_dtype(index) in ("Bool", "Byte") for index in node.inputsAt(1).node().inputs())


def _functional(kind: str) -> str:
    """Returns the operator that returns what another one writes."""
    name = kind.removesuffix("_")
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if name == kind or packet is None:
        raise _CannotFollowError
    # ``aten::normal`` takes no tensor to fill.
    return "aten::normal_functional" if name == "aten::normal" else name


def _is_view(node: Any) -> bool:
    """Whether the output of a node shares the memory of its first input."""
    name = _name(node)
    if name in ("dropout", "type_as"):
        # Their schemas do not say that they may return the input itself.
        return _is_same(node)
    schema = _schema_of(node)
    if schema is None or len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return False
    if name not in _METADATA and (schema.is_mutable or not (schema.arguments and schema.arguments[0].alias_info)):
        return False
    if name in ("reshape", "reshape_as", "flatten", "contiguous", "to"):
        return _is_same(node)
    return True


def _is_same(node: Any) -> bool:
    """Whether an operator that copies where it must has not copied."""
    name, given, made = _name(node), node.inputsAt(0).type(), node.output().type()
    if name == "dropout":
        rate, train = (node.inputsAt(index).toIValue() for index in (1, 2))
        return rate == 0 or not train
    if not (node.inputsAt(0).isCompleteTensor() and node.output().isCompleteTensor()):
        return False
    if name in ("contiguous", "to", "type_as"):
        schema = _schema_of(node)
        names = [one.name for one in schema.arguments] if schema is not None else []
        is_copied = "copy" in names and bool(node.inputsAt(names.index("copy")).toIValue())
        return not is_copied and _memory_format(given) == _memory_format(made)
    try:
        torch.empty_strided(given.sizes(), given.strides(), device="meta").view(made.sizes())
    except RuntimeError:
        return False
    return True


def _memory_format(kind: Any) -> tuple[Any, ...]:
    return kind.scalarType(), kind.device(), kind.strides()


def _spelled(value: Any) -> Any:
    """Describes an argument, equally where it is the same."""
    node = value.node()
    if node.kind() == "prim::Constant":
        return repr(value.toIValue())
    if node.kind() == "prim::ListConstruct":
        return tuple(map(_spelled, node.inputs()))
    return value.debugName()


def _end_of_slice(start: Any, end: Any) -> int | None:
    """Returns where the elements after a slice begin; None where that depends on the size of what is sliced."""
    first = 0 if start.type().kind() == "NoneType" else start.toIValue()
    last = _LAST if end.type().kind() == "NoneType" else end.toIValue()
    if first is None or last is None:
        return None
    is_known = first == 0 or last == _LAST or ((first < 0) == (last < 0) and first <= last)
    return int(last) if is_known else None


def _numbers(value: Any) -> list[int]:
    numbers = [one.toIValue() for one in value.node().inputs()]
    if any(number is None for number in numbers):
        raise _CannotFollowError
    return numbers


def _inverse(order: list[int]) -> list[int]:
    places = [place % len(order) for place in order]
    return [places.index(place) for place in range(len(places))]


def _dtype(value: Any) -> str | None:
    kind = value.type()
    return kind.scalarType() if kind.kind() == "TensorType" else None


def _rank(value: Any) -> int | None:
    dim: int | None = value.type().dim()
    return dim


def _as_differentiable(value: Any, *sources: Any) -> Any:
    """Notes in the type of a value that it needs a gradient if one of its sources does."""
    if value.isCompleteTensor() and not value.requires_grad() and any(one.requires_grad() for one in sources):
        kind = value.type()
        dtype = DTYPES[kind.scalarType()]
        like = torch.empty_strided(kind.sizes(), kind.strides(), dtype=dtype, device=kind.device(), requires_grad=True)
        value.inferTypeFrom(like)
    return value
