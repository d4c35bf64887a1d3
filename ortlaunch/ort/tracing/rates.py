"""The rates of dropout in a trace."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

DROPOUT = {
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "native_dropout"),
    *("alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"),
    *("feature_alpha_dropout", "feature_alpha_dropout_"),
}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class NotesRates(TorchFunctionMode):
    """Notes the rates of dropout.

    Attributes:
        rates: as those of `Reference`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.rates += rates_of(getattr(func, "__name__", ""), args, kwargs or {})
        return func(*args, **(kwargs or {}))


def rates_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Returns the rate with which a call of torch drops out: 0 if it does not; nothing for other functions."""
    is_active: Any = True
    if name in DROPOUT:
        rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        is_active = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    elif name == "scaled_dot_product_attention":
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    elif name == "multi_head_attention_forward":
        rate = args[10] if len(args) > 10 else kwargs.get("dropout_p", 0.0)
        is_active = kwargs.get("training", True)
    elif name in RECURRENT:
        # The rate is the only float among the arguments.
        return [float(arg) for arg in args if isinstance(arg, float)]
    else:
        return []
    return [float(rate) if is_active else 0.0]
