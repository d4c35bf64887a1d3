"""ORTModule on this torch: right, on its share of the cores, and never silently replaced."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.config.schema import Fallback, ModelConfig, OrtConfig, OrtDebugConfig, OrtLogLevel
from ortlaunch.models.registry import build_model
from ortlaunch.ort import session

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def wrapped(model: torch.nn.Module, tmp_path: Path, cfg: OrtConfig | None = None) -> torch.nn.Module:
    return session.wrap(model, cfg or OrtConfig(), threads=2, onnx_dir=tmp_path / "onnx")


class Fourier(torch.nn.Module):
    """Uses an operator that the exporter does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.hfft(self.linear(x), 8).sum()


def test_a_causal_model_without_attention_mask_has_eagers_loss_and_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = build_model(ModelConfig(name="gpt2_nano", params=NO_DROPOUT))
    ort = wrapped(copy.deepcopy(eager), tmp_path)
    for length in (32, 48):
        ids = torch.randint(0, 256, (3, length))
        for model in (eager, ort):
            model.zero_grad()
        expected, actual = eager(input_ids=ids, labels=ids).loss, ort(input_ids=ids, labels=ids).loss
        expected.backward()
        actual.backward()
        assert actual.item() == pytest.approx(expected.item(), abs=1e-5)
        of_ort = dict(ort.named_parameters())
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(of_ort[name].grad, parameter.grad, atol=1e-5, rtol=1e-4, msg=name)
    assert session.is_active(ort)
    assert session.fallback_reason(ort) is None


class Masked(torch.nn.Module):
    """Adds a mask, which has no heads, to scores of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).unflatten(-1, (4, 2)).transpose(1, 2)
        return (heads @ heads.transpose(-1, -2) + mask).softmax(-1) @ heads


def test_a_mask_without_heads_is_evaluated_too(tmp_path: Path) -> None:
    eager = Masked()
    ort = wrapped(copy.deepcopy(eager), tmp_path)
    for batch in (3, 1, 5):
        x, mask = torch.randn(batch, 6, 8), torch.zeros(batch, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1) > 0, -9e9)
        for model in (eager, ort):
            model.train(batch == 3)
        with torch.set_grad_enabled(batch == 3):
            torch.testing.assert_close(ort(x, mask), eager(x, mask))


@pytest.mark.parametrize(("level", "opened"), [(OrtLogLevel.warning, 1), (OrtLogLevel.info, 2)])
def test_a_training_session_is_opened_once(
    level: OrtLogLevel, opened: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ORTModule would open another one before it, to tell how much memory recomputation would save."""
    from onnxruntime.training.ortmodule import _training_manager

    usual, made = _training_manager.TrainingAgent, []

    def agent(*arguments: Any) -> Any:
        made.append(usual(*arguments))
        return made[-1]

    monkeypatch.setattr(_training_manager, "TrainingAgent", agent)
    cfg = OrtConfig(debug=OrtDebugConfig(log_level=level))
    wrapped(build_model(ModelConfig(name="mlp")), tmp_path, cfg)(torch.rand(2, 64)).sum().backward()
    assert len(made) == opened


def test_nothing_is_active_before_the_first_forward(tmp_path: Path) -> None:
    ort = wrapped(build_model(ModelConfig(name="mlp")), tmp_path)
    assert not session.is_active(ort)
    assert session.export_seconds(ort) is None
    ort(torch.rand(2, 64)).sum().backward()
    assert session.is_active(ort)
    assert 0 < session.export_seconds(ort) < 120


def test_an_unsupported_operator_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="fft_hfft"):
        wrapped(Fourier(), tmp_path)(torch.rand(2, 8))


def test_with_warn_it_falls_back_and_says_so(tmp_path: Path) -> None:
    model = Fourier()
    ort = wrapped(copy.deepcopy(model), tmp_path, OrtConfig(fallback=Fallback.warn))
    x = torch.rand(2, 8)
    torch.testing.assert_close(ort(x), model(x))
    assert not session.is_active(ort)
    assert "fft_hfft" in session.fallback_reason(ort)


def test_the_environment_does_not_change_the_fallback_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_ONNX_MODEL")
    with pytest.raises(Exception, match="fft_hfft"):
        wrapped(Fourier(), tmp_path)(torch.rand(2, 8))


@pytest.mark.parametrize(
    ("cfg", "threads", "spinning"),
    [(OrtConfig(), 2, "0"), (OrtConfig(threads=3, spinning=True), 3, "1")],
)
def test_sessions_get_the_workers_share_of_the_cores(
    tmp_path: Path, cfg: OrtConfig, threads: int, spinning: str
) -> None:
    ort = wrapped(build_model(ModelConfig(name="mlp")), tmp_path, cfg)
    ort(torch.rand(2, 64)).sum().backward()
    options, _, _ = ort._torch_module._execution_manager(True)._get_session_config()
    assert options.intra_op_num_threads == threads
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == spinning


def test_save_onnx_leaves_the_graphs_in_the_given_folder(tmp_path: Path) -> None:
    cfg = OrtConfig(debug=OrtDebugConfig(save_onnx=True, onnx_prefix="net"))
    wrapped(build_model(ModelConfig(name="mlp")), tmp_path, cfg)(torch.rand(2, 64)).sum().backward()
    names = {path.name for path in (tmp_path / "onnx").iterdir()}
    assert any(name.startswith("net_torch_exported") for name in names)
    assert any("execution_model" in name for name in names)


@pytest.mark.parametrize(
    ("n", "prepend", "dtype"), [(1, False, torch.int64), (1, True, torch.int64), (2, False, torch.float32)]
)
def test_diff_and_cumsum_are_exported_as_torch_means_them(
    tmp_path: Path, n: int, prepend: bool, dtype: torch.dtype
) -> None:
    class Differences(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            first = x[:, :1] - 1 if prepend else None
            steps = torch.diff(x, n=n, prepend=first, dim=-1)
            return self.weight * steps, (steps != 1).cumsum(-1), torch.diff(x > 2, dim=-1)

    eager = Differences()
    ort = wrapped(copy.deepcopy(eager), tmp_path)
    for seed in (0, 1):
        torch.manual_seed(seed)
        x = torch.randint(0, 5, (3, 7)).to(dtype)
        for expected, actual in zip(eager(x), ort(x), strict=True):
            torch.testing.assert_close(actual, expected)


def run_python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=240
    )


def test_many_models_in_a_process_register_the_exports_of_operators_once(tmp_path: Path) -> None:
    """Each constructor registers them again; those that keep what they replace would pile up to a RecursionError."""
    wrapped(torch.nn.Linear(4, 4), tmp_path)
    from torch.onnx._internal import registration

    def exports() -> dict[str, int]:
        depths = dict.fromkeys(registration.registry.all_functions(), 0)
        for name in depths:
            symbolic = registration.registry.get_function_group(name).get(17)
            while (symbolic := getattr(symbolic, "original", None)) is not None:
                depths[name] += 1
        return depths

    once = exports()
    assert once["aten::maximum"] == 2
    for _ in range(2):
        wrapped(torch.nn.Linear(4, 4), tmp_path)
    assert exports() == once


def test_a_missing_compiler_is_one_clear_message(tmp_path: Path) -> None:
    result = run_python(
        """
        from ortlaunch.base.errors import RequestError
        from ortlaunch.ort import session
        try:
            session.import_ortmodule()
        except RequestError as error:
            print(error)
        """,
        {"ORTLAUNCH_CACHE": str(tmp_path / "cache"), "PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    assert "no C++ compiler" in result.stdout
    assert "apt-get install g++" in result.stdout
    assert "backend=eager" in result.stdout
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_the_compatibility_layer_restores_what_it_moved() -> None:
    """Outside ORTModule's own exports torch.onnx.export keeps this torch's default. torchvision imports a part of the
    exporter by its old name, before anything of ours."""
    result = run_python(
        """
        import torch
        from torch.onnx import symbolic_helper, symbolic_opset11
        before = torch.onnx.export
        from pathlib import Path
        from ortlaunch.config.schema import OrtConfig
        from ortlaunch.ort import session
        model = session.wrap(torch.nn.Linear(4, 4), OrtConfig(), threads=1, onnx_dir=Path("."))
        model(torch.rand(2, 4)).sum().backward()
        assert session.is_active(model)
        assert torch.onnx.export is before
        print("kept")
        """,
        {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
    )
    assert result.stdout.strip().endswith("kept"), result.stderr


def test_an_export_imports_no_deepspeed_mlflow_or_setuptools() -> None:
    """ORTModule would import the first two for a ZeRO 3 of its own: 1.4 s of each first start. What needs setuptools
    gets torch's own module afterwards."""
    result = run_python(
        """
        import sys
        import torch
        from ortlaunch.config.schema import OrtConfig
        from ortlaunch.ort import session
        model = session.wrap(torch.nn.Linear(4, 4), OrtConfig(export_cache=False), threads=1, onnx_dir=None)
        model(torch.rand(2, 4)).sum().backward()
        assert session.is_active(model)
        found = sorted({"deepspeed", "mlflow", "setuptools"} & sys.modules.keys())
        from torch.utils import cpp_extension
        import setuptools
        assert issubclass(cpp_extension.BuildExtension, setuptools.Command)
        print(found)
        """,
        {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
    )
    assert result.stdout.strip().endswith("[]"), result.stdout + result.stderr
