"""Finds image files and their classes, without reading an image."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.nearest import nearest
from ortlaunch.data.files import UNSET

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""The endings of the files that are taken from a folder of a class."""
TRAIN, EVAL = "train", "val"
PATH, LABEL = "path", "label"


@dataclass(frozen=True)
class Images:
    """Image files with their classes."""

    folder: Path
    """Where the paths begin."""
    paths: list[str]
    labels: list[int]


@dataclass(frozen=True)
class Found:
    """What a path holds."""

    classes: list[str]
    train: Images
    held_out: Images | None
    """None where a part of `train` is to be held out."""


def class_names(value: str) -> list[str]:
    """The classes in order; the files in their folders are not looked at.

    Raises:
        RequestError: there is no such folder or csv, or it names no classes.
    """
    path = _existing(value)
    if path.is_file():
        return _classes_of([label for _, label in _rows(path)])
    trained, held_out = _parts(path)
    classes = _folders(trained)
    unknown = sorted(set(_folders(held_out)) - set(classes)) if held_out is not None else []
    if unknown:
        raise RequestError(f"data.path={value}: {EVAL}/ has the class {unknown[0]}, which {TRAIN}/ lacks")
    return classes


def find_images(value: str) -> Found:
    """Lists the images, those of a folder in the order of their names.

    Raises:
        RequestError: as `class_names`, or the folder of a class holds no image.
    """
    path, classes = _existing(value), class_names(value)
    if path.is_file():
        rows = _rows(path)
        number = {name: place for place, name in enumerate(classes)}
        labels = [number[label] for _, label in rows]
        return Found(classes, Images(path.parent, [name for name, _ in rows], labels), None)
    trained, held_out = _parts(path)
    return Found(classes, _listed(trained, classes), None if held_out is None else _listed(held_out, classes))


def _existing(value: str) -> Path:
    if value.strip() in UNSET:
        raise RequestError("data.path is not set: give a folder with a folder for each class, or a csv")
    path = Path(value).expanduser()
    if not path.exists():
        raise RequestError(f"data.path={value}: no such file or folder")
    if path.is_file() and path.suffix.lower() != ".csv":
        raise RequestError(f"data.path={value}: a file, but no csv: give a folder of classes, or a csv")
    return path


def _parts(path: Path) -> tuple[Path, Path | None]:
    """The folders of classes for training and for evaluation."""
    if not (path / TRAIN).is_dir():
        return path, None
    return path / TRAIN, path / EVAL if (path / EVAL).is_dir() else None


def _folders(folder: Path) -> list[str]:
    names = sorted(one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    if not names:
        raise RequestError(f"data.path: {folder} holds no folder: give each class a folder with its images")
    return names


def _listed(folder: Path, classes: list[str]) -> Images:
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue  # Of an evaluation, which need not have each class.
        found = sorted(_images_in(folder / name))
        if not found:
            raise RequestError(
                f"data.path: {folder / name} holds no image ({', '.join(ENDINGS)}): remove the folder, or put the "
                f"images of the class {name} there"
            )
        paths += [os.path.relpath(one, folder) for one in found]
        labels += [label] * len(found)
    return Images(folder, paths, labels)


def _images_in(folder: Path) -> Iterator[str]:
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [one for one in folders if not one.startswith(".")]
        for name in files:
            if name.lower().endswith(ENDINGS) and not name.startswith("."):
                yield os.path.join(place, name)


def _rows(path: Path) -> list[tuple[str, str]]:
    """The paths and labels of a csv."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            for column in (PATH, LABEL):
                if column not in columns:
                    close = nearest(column, columns)
                    hint = f" (is it {close}?)" if close else ""
                    raise RequestError(
                        f"data.path={path}: has no column {column}{hint}; its first line names {', '.join(columns)}: "
                        f"let it name {PATH} and {LABEL}"
                    )
            rows = [((row[PATH] or "").strip(), (row[LABEL] or "").strip()) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"data.path={path}: no csv in UTF-8: {error}") from error
    for line, row in enumerate(rows, start=2):
        if not all(row):
            raise RequestError(f"data.path={path}: row {line} has no {PATH if not row[0] else LABEL}")
    if not rows:
        raise RequestError(f"data.path={path}: has no row beside its first line")
    return rows


def _classes_of(labels: list[str]) -> list[str]:
    names = set(labels)
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)
