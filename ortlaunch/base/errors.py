"""Errors that ortlaunch shows its user."""

from __future__ import annotations


class RequestError(Exception):
    """The request is wrong: usage, configuration or missing input. Ends with exit code 2 and this one message."""


class TrainingError(Exception):
    """The training itself failed. Ends with exit code 1 and this message."""
