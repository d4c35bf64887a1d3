"""Built-in models and data sources, trained for some steps by two real workers."""

from __future__ import annotations

import numpy
import pytest

SHORT = ("train.log_every=5", "tracking=none")


@pytest.mark.parametrize("model", ["mlp", "resnet", "vit"])
def test_image_models_train_on_digits(train, tmp_path, model):
    """model=NAME alone is enough: the images come with it. The mlp on the default backend, the others on eager."""
    backend = () if model == "mlp" else ("backend=eager",)
    learning = ("train.steps=40", "train.batch_size=32", "optimizer.lr=0.001")
    result = train(tmp_path, f"model={model}", *backend, *learning, *SHORT)
    assert result.status == "FINISHED", result.report
    assert result.losses[40] < 0.95 * result.losses[1]
    assert result.tags["ortlaunch.ort_active"] == ("false" if backend else "true")


def test_text_of_the_users_own(train, tmp_path):
    """data=text with a folder: files in it are read as bytes; a text that repeats itself is soon learnt."""
    (tmp_path / "corpus").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "corpus" / name).write_text("the quick brown fox jumps over the lazy dog. " * 200)
    data = ("data=text", "data.path=corpus", "data.seq_len=32", "train.steps=40", "optimizer.lr=0.003")
    result = train(tmp_path, *data, "backend=eager", *SHORT)
    assert result.status == "FINISHED", result.report
    assert result.losses[40] < 3.0 < result.losses[1]


def test_tokens_of_the_users_own(train, tmp_path):
    """data=tokens: ids in a .bin file without a header; ids that count up are soon learnt."""
    numpy.tile(numpy.arange(100, dtype=numpy.uint16), 200).tofile(tmp_path / "train.bin")
    data = ("data=tokens", "data.path=train.bin", "data.seq_len=32", "train.steps=40", "optimizer.lr=0.003")
    result = train(tmp_path, *data, "backend=eager", *SHORT)
    assert result.status == "FINISHED", result.report
    assert result.losses[40] < 3.0 < result.losses[1]
