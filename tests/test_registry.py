"""Names, registration, entry points, targets and the configuration of models."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import add_working_folder
from ortlaunch.config.schema import Config, ModelConfig, register_schemas
from ortlaunch.models import registry
from ortlaunch.models.registry import (
    available,
    build_model,
    check_request,
    register_model,
    suggest,
    unknown_model_message,
)
from tests.support.packages import install_metadata

CONF = Path(__file__).resolve().parents[1] / "conf"

USER_MODULE = '''
"""A user's models."""
import torch
from torch import nn

SIZE = 3


class Net(nn.Module):
    """One layer."""

    def __init__(self, width, *, depth=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    @classmethod
    def wide(cls):
        return cls(100)


def make(width=2, **rest):
    return Net(width, **rest)


def pretrained():
    return Net(2, depth=2).eval()


def partly_frozen():
    model = Net(2, depth=2)
    model.layers[0].eval()
    return model


def fails():
    return {}["no such key"]


def gives_nothing():
    return None


def parallel():
    return nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
'''


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of one test are gone in the next."""
    monkeypatch.setattr(registry, "_REGISTERED", {})


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` with a package of the user's."""
    (tmp_path / "user_models").mkdir()
    (tmp_path / "user_models" / "__init__.py").touch()
    (tmp_path / "user_models" / "nets.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "user_models"]:
        del sys.modules[name]


def write_module(folder: Path, name: str, text: str) -> str:
    (folder / "user_models" / f"{name}.py").write_text(text)
    return f"user_models.{name}"


def announce(folder: Path, package: str, *lines: str) -> None:
    """Installs a distribution that announces models, as far as its metadata goes."""
    install_metadata(folder, package, {"ortlaunch.models": list(lines)})


def factory(target: str | None, **params: Any) -> nn.Module:
    return build_model(ModelConfig(name="factory", target=target, params=params))


def test_names_without_heavy_imports(tmp_path: Path) -> None:
    announce(tmp_path, "elsewhere", "far_model = does_not_exist:build")
    code = (
        "import sys\nfrom ortlaunch.models.registry import *\n"
        "from ortlaunch.models.registry import ModelConfig, check_request\n"
        "print(sorted(available()), suggest('gtp2'))\nunknown_model_message('x')\n"
        "check_request(ModelConfig(name='gpt2'))\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'onnxruntime', 'mlflow') if m in sys.modules])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    names, heavy = done.stdout.splitlines()
    expected = [
        "bert",
        "factory",
        "far_model",
        "gpt2",
        "gpt2_nano",
        "hf",
        "llama",
        "mlp",
        "resnet",
        "timm",
        "torchvision",
        "vit",
    ]
    assert names == f"{expected} gpt2"
    assert heavy == "[]"


def test_unknown_name_lists_and_suggests() -> None:
    assert suggest("gpt2-nano") == "gpt2_nano"
    assert suggest("zzzzzz") is None
    message = unknown_model_message("lama")
    assert "'lama'" in message and "model=llama?" in message and "bert, factory, gpt2" in message
    with pytest.raises(RequestError, match="Did you mean model=llama"):
        build_model(ModelConfig(name="lama"))


def test_only_a_named_module_of_the_working_folder_comes_before_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("this", "json", "turtle"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
        (tmp_path / f"{name}.py").write_text("from torch import nn\nclass Net(nn.Linear): ...\n")
    del sys.modules["this"], sys.modules["turtle"]
    add_working_folder()
    params = {"in_features": 2, "out_features": 2}
    assert type(factory("this:Net", **params)).__module__ == "this"
    with pytest.raises(RequestError, match=f"a library named json is in use here: give {tmp_path}/json.py another"):
        factory("json:Net", **params)
    assert importlib.util.find_spec("turtle").origin != str(tmp_path / "turtle.py")  # type: ignore[union-attr]


def test_decorated_class_and_function() -> None:
    @register_model("mine", inputs="images")
    class Mine(nn.Linear):
        """A layer of mine.

        More about it.
        """

    @register_model("halved")
    def halved(features: int) -> nn.Module:
        return nn.Linear(features, features // 2)

    entry = available()["mine"]
    assert (entry.inputs, entry.summary) == ("images", "A layer of mine.")
    assert entry.target.endswith("Mine")
    assert available()["halved"].inputs == "any"
    assert type(build_model(ModelConfig(name="mine", params={"in_features": 2, "out_features": 3}))) is Mine
    assert build_model(ModelConfig(name="halved", params={"features": 6})).out_features == 3
    with pytest.raises(RequestError, match=r"model\.params\.feature: model halved.*model\.params\.features\?"):
        build_model(ModelConfig(name="halved", params={"feature": 6}))


def test_duplicate_names() -> None:
    def first() -> nn.Module:
        return nn.Linear(1, 1)

    register_model("twice")(first)
    register_model("twice")(first)
    with pytest.raises(RequestError, match=r"register_model\('twice'\).*belongs to .*first"):
        register_model("twice")(lambda: nn.Linear(2, 2))
    with pytest.raises(RequestError, match="belongs to ortlaunch itself"):
        register_model("gpt2")(first)
    with pytest.raises(RequestError, match="inputs is one of tokens, images, any"):
        register_model("odd", inputs="sounds")  # type: ignore[arg-type]


def test_imports_come_before_the_name(user: Path) -> None:
    module = write_module(
        user,
        "decorated",
        "from ortlaunch.models.registry import register_model\nfrom user_models.nets import Net\n"
        "@register_model('decorated')\ndef build(width=4):\n    return Net(width)\n",
    )
    with pytest.raises(RequestError, match="there is no model 'decorated'"):
        build_model(ModelConfig(name="decorated"))
    model = build_model(ModelConfig(name="decorated", imports=[module], params={"width": 5}))
    assert model.layers[0].in_features == 5
    with pytest.raises(RequestError, match=r"there is no model 'decoratd'.*model=decorated"):
        build_model(ModelConfig(name="decoratd", imports=[module]))


@pytest.mark.parametrize(
    ("name", "text", "pattern"),
    [
        (None, "", r"model\.imports: user_models\.absent: there is no module 'user_models\.absent'"),
        ("needy", "import not_installed_at_all", r"model\.imports: .*needy failed: No module named 'not_installed"),
        ("stale", "from torch import no_such_name", r"model\.imports: .*stale failed: cannot import name"),
        ("broken", "def build(:", r"model\.imports: .*broken failed: invalid syntax.*broken\.py"),
    ],
)
def test_imports_that_fail(user: Path, name: str | None, text: str, pattern: str) -> None:
    module = write_module(user, name, text) if name else "user_models.absent"
    with pytest.raises(RequestError, match=pattern):
        build_model(ModelConfig(name="mlp", imports=[module]))


def test_entry_point(user: Path) -> None:
    announce(user, "their-models", "theirs = user_models.nets:make", "gone = user_models.nets:absent")
    entry = available()["theirs"]
    assert (entry.target, entry.inputs) == ("user_models.nets:make", "any")
    assert "their-models" in entry.summary
    assert "user_models" not in sys.modules
    assert suggest("their") == "theirs"
    assert build_model(ModelConfig(name="theirs", params={"width": 7})).layers[0].in_features == 7
    with pytest.raises(RequestError, match=r"model=gone .*their-models.*has no 'absent'"):
        build_model(ModelConfig(name="gone"))


def test_entry_point_does_not_take_a_name_that_is_taken(user: Path, caplog: pytest.LogCaptureFixture) -> None:
    announce(user, "greedy", "mlp = user_models.nets:make")
    with caplog.at_level(logging.WARNING):
        assert available()["mlp"].target == "ortlaunch.models.built_in.mlp:build"
    assert "model 'mlp' of greedy is left out" in caplog.text


def test_factory_with_class_function_and_method(user: Path) -> None:
    assert len(factory("user_models.nets:Net", width=3, depth=2).layers) == 2
    assert len(factory("user_models.nets:make", depth=4).layers) == 4
    assert factory("user_models.nets:Net.wide").layers[0].in_features == 100
    assert factory("torch.nn:Linear", in_features=2, out_features=5).out_features == 5


@pytest.mark.parametrize(
    ("target", "params", "pattern"),
    [
        (None, {}, r"model=factory.*model\.target=package\.module:callable"),
        ("user_models.nets.Net", {}, r"model\.target=user_models\.nets\.Net is not of the form"),
        ("user_models.nets:", {}, r"is not of the form"),
        (".nets:Net", {}, r"is not of the form"),
        ("user_model.nets:Net", {}, r"model\.target=user_model\.nets:Net: there is no module 'user_model'"),
        ("user_models.net:Net", {}, r"there is no module 'user_models\.net'"),
        ("user_models.nets:Nett", {}, r"user_models\.nets has no 'Nett'. Did you mean Net\?"),
        ("user_models.nets:SIZE", {}, r"'SIZE' is a int, not a class or function"),
        ("user_models.nets:Net", {"widht": 3}, r"model\.params\.widht: .*params\.width\?.*accepts: depth, width"),
        ("user_models.nets:Net", {"depth": 3}, r"cannot be built without model\.params\.width"),
        ("user_models.nets:gives_nothing", {}, r"the model is a NoneType, not a torch\.nn\.Module"),
        ("user_models.nets:gives_nothing", {"a": 1}, r"model\.params\.a: .*accepts: none at all"),
        ("user_models.nets:parallel", {}, r"DataParallel \(at '0'\).*DistributedDataParallel"),
    ],
)
def test_factory_refuses(user: Path, target: str | None, params: dict[str, Any], pattern: str) -> None:
    with pytest.raises(RequestError, match=pattern):
        factory(target, **params)


def test_a_model_comes_in_training_mode_and_its_modules_in_the_mode_that_they_were_given(user: Path) -> None:
    """`from_pretrained` returns a model in evaluation mode, in which it would be trained without dropout."""
    assert all(module.training for module in factory("user_models.nets:pretrained").modules())
    model = factory("user_models.nets:partly_frozen")
    assert [model.training, *(layer.training for layer in model.layers)] == [True, False, True]


def test_users_own_error_keeps_its_traceback(user: Path) -> None:
    with pytest.raises(KeyError) as caught:
        factory("user_models.nets:fails")
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails"


def test_target_needs_the_factory() -> None:
    with pytest.raises(RequestError, match=r"model\.target=a:b .*model=factory.*mlp"):
        check_request(ModelConfig(name="mlp", target="a:b"))


@pytest.mark.parametrize(("target", "missing"), [("os:nope", "os has no 'nope'"), ("math:pi.nope", "has no 'pi.nope'")])
def test_a_name_that_the_standard_library_lacks_is_refused_before_anything_starts(target: str, missing: str) -> None:
    with pytest.raises(RequestError, match=missing):
        check_request(ModelConfig(name="factory", target=target))


def test_names_that_imports_will_bring_are_not_judged_beforehand() -> None:
    check_request(ModelConfig(name="comes_later", imports=["some.module"]))
    with pytest.raises(RequestError, match="there is no model 'comes_later'"):
        check_request(ModelConfig(name="comes_later"))


def composed(*overrides: str) -> Config:
    register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def model_of(*overrides: str) -> ModelConfig:
    return OmegaConf.to_object(composed(*overrides).model)


def test_every_built_in_has_a_config_file() -> None:
    files = {path.stem for path in (CONF / "model").glob("*.yaml")}
    assert files == {name for name, entry in available().items() if entry.target.startswith("ortlaunch.")} | {"factory"}


@pytest.mark.parametrize("name", ["mlp", "resnet", "vit", "gpt2_nano", "gpt2", "bert", "llama"])
def test_config_file_lists_the_defaults(name: str) -> None:
    listed = model_of(f"model={name}")
    with torch.device("meta"):
        with_params, without = build_model(listed), build_model(ModelConfig(name=name))
    assert [(key, value.shape) for key, value in with_params.state_dict().items()] == [
        (key, value.shape) for key, value in without.state_dict().items()
    ]
    if name != "mlp":
        assert with_params.config.to_dict() | listed.params == without.config.to_dict() | listed.params
        ignored = {"mask_token_id"}
        differing = {
            key: value
            for key, value in listed.params.items()
            if key not in ignored and getattr(without.config, key) != value
        }
        assert differing == {}


def test_listed_params_are_set_by_name() -> None:
    assert model_of("model=gpt2", "model.params.n_layer=6").params["n_layer"] == 6
    assert model_of("model=hf", "model.params.pretrained=x").params["task"] == "causal-lm"


def test_image_models_bring_images_unless_told_otherwise() -> None:
    for name in ("mlp", "resnet", "vit"):
        assert composed(f"model={name}").data.name == "digits"
        assert composed(f"model={name}", "data=synthetic").data.name == "synthetic"
        assert composed("data=synthetic", f"model={name}").data.name == "synthetic"
    assert composed("model=gpt2").data.name == "pysource"


def test_factory_from_the_command_line(user: Path) -> None:
    cfg = model_of("model=factory", "model.target=user_models.nets:Net", "+model.params.width=3")
    assert build_model(cfg).layers[0].in_features == 3
