"""Builds the models of timm and torchvision by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.base.nearest import nearest


def from_timm(name: str, params: dict[str, Any]) -> nn.Module:
    """A model of timm.

    Raises:
        RequestError: timm is missing, it has no such model, or the model takes no such arguments.
    """
    with _explained("timm", name):
        import timm

        if not timm.is_model(name.partition(".")[0]):
            raise _unknown("timm", name, timm.list_models())
        model: nn.Module = timm.create_model(name, **params)
        return model


def from_torchvision(name: str, params: dict[str, Any]) -> nn.Module:
    """A classifier of torchvision.

    Raises:
        RequestError: torchvision is missing, it has no such classifier, or the model takes no such arguments.
    """
    with _explained("torchvision", name):
        from torchvision import models

        known = models.list_models(module=models)
        if name not in known:
            raise _unknown("torchvision", name, known)
        model: nn.Module = models.get_model(name, **params)
        return model


def _unknown(package: str, name: str, known: Iterable[str]) -> RequestError:
    close = nearest(name, list(known))
    hint = f" Did you mean {close}?" if close else ""
    return RequestError(f"model.params.name={name}: {package} has no model of this name.{hint}")


@contextmanager
def _explained(package: str, name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise RequestError(f"model={package} needs {package} ({error}): pip install 'ortlaunch[vision]'") from error
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise RequestError(f"model.params: {package}'s {name} cannot be built with these: {error}") from error
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        raise RequestError(
            f"model={package}: torchvision does not fit the installed torch ({error}): pip install torchvision from "
            "the index that torch came from"
        ) from error
