"""Errors that ortlaunch shows its user."""

from __future__ import annotations


class RequestError(Exception):
    """The request is wrong: usage, configuration or missing input. The command exits with code 2 and this message."""


class FindingError(RequestError):
    """The check at a run's start has found that the backend computes something else than PyTorch."""


class TrainingError(Exception):
    """The training itself failed. The command exits with code 1 and this message."""


class WrongGradientsError(TrainingError):
    """The backend computes other gradients than PyTorch, which a comparison has found while the run trains."""
