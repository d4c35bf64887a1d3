"""What the ledger and the trace count, beside sizes that are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.estimate.ledger import Ledger, Use
from ortlaunch.estimate.pretend import few_numbers_known, join_nobody, loaded_without_content, replacements
from ortlaunch.estimate.trace import BESIDE, CHECKPOINT, OTHERS_BESIDE, OTHERS_CHECKPOINT, Parts, Trace, trace
from ortlaunch.trainer.workers import Workers

MIB = 2**20
QUARTER = MIB // 4
"""Numbers in a MiB of fp32."""
SHAPES = {
    "pixel_values": torch.empty(16, 1, 8, 8, device="meta"),
    "labels": torch.empty(16, dtype=torch.int64, device="meta"),
}
PARAMETERS = 4 * 19_210


def test_the_ledger_counts_what_is_alive_and_a_view_once() -> None:
    with Ledger() as ledger:
        first = torch.zeros(QUARTER)
        view = first[1:].view(-1)
        second = first + 1
        assert ledger.now == 2 * MIB
        del second, view
    assert ledger.now == MIB
    assert ledger.take_peak().tensors == 2 * MIB
    assert ledger.take_peak().tensors == MIB


def test_memory_that_was_never_written_does_not_count() -> None:
    with Ledger() as ledger:
        bucket = torch.empty(64 * QUARTER)
        bucket.narrow(0, 0, 8 * QUARTER).zero_()
        assert ledger.now == 8 * MIB
        del bucket
    assert ledger.now == 0


def test_a_storage_that_is_resized_in_place_is_counted_anew() -> None:
    with Ledger() as ledger, ledger.seeing_resizes():
        gathered = torch.zeros(8 * QUARTER)
        gathered.untyped_storage().resize_(0)
        assert ledger.now == 0
        del gathered
    assert ledger.now == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_tensor_has_the_memory_of_its_parts() -> None:
    with Ledger() as ledger:
        values, rows = torch.ones(QUARTER), torch.zeros(1, QUARTER, dtype=torch.int64)
        sparse = torch.sparse_coo_tensor(rows, values, (10,), check_invariants=False) * 2
        assert ledger.now == 6 * MIB
        del sparse
        assert ledger.now == 3 * MIB
        rows = torch.eye(QUARTER // 8, 2).to_sparse_csr()
        assert MIB < ledger.now < 3 * MIB
        rows = torch.ones(QUARTER).to_mkldnn()
        assert ledger.now == MIB
        del rows


def test_what_no_operation_has_made_is_counted_once() -> None:
    with Ledger() as ledger:
        mapped = torch.frombuffer(bytearray(2 * MIB), dtype=torch.float32)
        ledger.adopt(mapped)
        ledger.adopt(mapped.view(2, -1))
        mapped += 1
        assert ledger.now == 2 * MIB
        del mapped
    assert ledger.now == 0


def test_weights_that_are_read_from_a_folder_are_parameters_and_not_activations(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 2000, "dim": 64, "hidden_dim": 128, "n_heads": 2, "n_layers": 1}
    # Its loader pads a bias beside tied weights, which gives a parameter other data.
    model = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**sizes))
    model.save_pretrained(tmp_path)
    size = sum(one.nbytes for one in model.parameters())
    config = to_config(
        compose(
            [
                *("model=hf", f"model.params.pretrained={tmp_path}", "model.params.task=masked-lm"),
                *("+model.params.mask_token_id=3", "trainer=single", "backend=eager", "device=cpu"),
            ]
        )
    )
    shapes = dict.fromkeys(("input_ids", "labels"), torch.empty(2, 8, dtype=torch.int64, device="meta"))
    found = trace(config, Workers(0, 1, torch.device("cpu"), 1), shapes)
    buffers = sum(one.nbytes for one in model.buffers())
    assert (found.parts.parameters, found.parts.gradients) == (size + buffers, size)
    assert found.parts.activations < size
    assert size <= found.phases["build"].tensors < 1.1 * size


def test_weights_that_a_model_of_the_user_reads_from_a_file_need_no_content(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(QUARTER)}, tmp_path / "one.safetensors")
    usual, ledger = safetensors.torch.load_file, Ledger()
    with FakeTensorMode() as mode, loaded_without_content(mode, ledger.adopt), ledger:
        found = safetensors.torch.load_file(tmp_path / "one.safetensors")
        assert isinstance(found["weight"], FakeTensor)
        assert ledger.now == MIB
        del found
    assert ledger.now == 0
    assert safetensors.torch.load_file is usual


def traced(*words: str) -> Trace:
    config = to_config(compose(["model=mlp", "trainer=single", "backend=eager", "device=cpu", *words]))
    return trace(config, Workers(0, 1, torch.device("cpu"), 1), SHAPES)


def test_weights_that_are_drawn_within_bounds_need_no_content() -> None:
    with replacements():
        with FakeTensorMode(), Ledger() as ledger:
            weight = torch.nn.init.trunc_normal_(torch.nn.Parameter(torch.empty(QUARTER)))
            # Two masks of a byte for each number, and the two together.
            assert (ledger.now, ledger.take_peak().tensors) == (MIB, 1.75 * MIB)
            del weight
        drawn = torch.nn.init.trunc_normal_(torch.empty(1000), a=-1.0, b=1.0)
    assert 0.9 < drawn.abs().max() <= 1


def test_the_rates_of_a_vision_models_layers_can_be_read_while_it_is_built() -> None:
    expected = torch.linspace(0, 0.3, 4).tolist()
    with FakeTensorMode() as mode, few_numbers_known(mode):
        rates = [one.item() for one in torch.linspace(0, 0.3, 4)]
        of_stages = [one.tolist() for one in torch.linspace(0, 0.3, 4, device="cpu").split([1, 3])]
        assert rates == expected == [one for stage in of_stages for one in stage]
        many = torch.linspace(0, 1, 100_000) + 1
        assert isinstance(many, FakeTensor)
        with pytest.raises(DataDependentOutputException):
            many[0].item()
    assert torch.linspace(0, 0.3, 4).tolist() == expected


def test_a_vision_transformer_is_traced() -> None:
    words = ["model=vit", "model.params.num_hidden_layers=1", "trainer=single", "backend=eager", "device=cpu"]
    found = trace(to_config(compose(words)), Workers(0, 1, torch.device("cpu"), 1), SHAPES)
    assert found.parts.gradients > 4 * 50_000


def test_the_parts_of_a_step_are_what_the_optimizer_needs() -> None:
    parts = traced().parts
    assert (parts.parameters, parts.gradients) == (PARAMETERS, PARAMETERS)
    # Two moments, and a step counter for each of the four parameters.
    assert parts.optimizer_state == 2 * PARAMETERS + 4 * 4
    # The hidden layer after its activation, and the logits.
    assert 16 * 256 * 4 + 16 * 10 * 4 <= parts.activations < 18_000


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["optimizer=sgd"], PARAMETERS),
        (["optimizer=sgd", "optimizer.momentum=0"], 0),
        (["optimizer=adafactor"], None),
        (["train.precision=bf16", "train.grad_accumulation=8"], 2 * PARAMETERS + 4 * 4),
    ],
    ids=["sgd", "no momentum", "adafactor", "bf16"],
)
def test_the_state_is_that_of_the_optimizer(words: list[str], state: int | None) -> None:
    found = traced(*words).parts.optimizer_state
    assert found == state if state is not None else 0 < found < PARAMETERS


def test_the_last_checkpoint_and_the_weights_are_written_without_a_copy() -> None:
    phases = traced().phases
    assert list(phases) == ["build", "start", "step", "checkpoint", "end"]
    for phase in ("checkpoint", "end"):
        assert 3 * PARAMETERS <= phases[phase].tensors < 3.5 * PARAMETERS


def test_a_step_may_be_taken_beside_the_copy_of_a_checkpoint() -> None:
    """Weights, the optimizer's two states and their copies are six times the weights; gradients come on top of them."""
    phases = traced("train.checkpoint_every=2", "train.steps=4").phases
    assert 6 * PARAMETERS <= phases[CHECKPOINT].tensors < 6.5 * PARAMETERS
    assert 7 * PARAMETERS < phases[BESIDE].tensors < 7.5 * PARAMETERS


class Queue(torch.nn.Module):
    """Keeps a mebibyte of what it has seen in its state dict, and two beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(64, 10)
        self.register_buffer("queue", torch.zeros(QUARTER))
        self.register_buffer("seen", torch.zeros(2 * QUARTER), persistent=False)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.out(pixel_values.flatten(1))


def test_buffers_in_no_state_dict_are_copied_too() -> None:
    words = ("model=factory", f"model.target={__name__}:Queue", "train.checkpoint_every=2", "train.steps=4")
    assert 6 * MIB < traced(*words).phases[CHECKPOINT].tensors < 6.2 * MIB


def test_an_adapter_alone_has_gradients_and_optimizer_state() -> None:
    parts = traced("adapter=lora", "adapter.rank=1", "adapter.targets=[all-linear]").parts
    assert 0 < 20 * parts.gradients < parts.parameters
    assert 10 * parts.optimizer_state < parts.parameters


def test_an_evaluation_keeps_a_copy_of_buffers_that_differ_from_the_first_workers() -> None:
    words = ("model=factory", f"model.target={__name__}:Queue", "trainer=fsdp", "backend=eager", "device=cpu")
    config = to_config(compose([*words, "train.eval_every=1", "train.save_weights=false"]))
    join_nobody(2)
    try:
        found = trace(config, Workers(0, 2, torch.device("cpu"), 1), SHAPES)
    finally:
        dist.destroy_process_group()
    assert 6 * MIB < found.phases["evaluation"].tensors < 6.2 * MIB


def test_the_memory_of_several_copies_is_there_beside_every_step_to_the_next_checkpoint() -> None:
    once, kept = (
        traced(f"train.checkpoint_every={every}", "train.steps=30", "train.eval_every=7").phases for every in (15, 10)
    )
    assert kept["step"] == once["step"]
    assert kept["evaluation"] == once["evaluation"]
    assert BESIDE not in kept
    assert kept[CHECKPOINT] == once[BESIDE]
    assert kept["end"].tensors < 3.5 * PARAMETERS


def test_tensors_that_only_have_a_shape_take_no_memory() -> None:
    with FakeTensorMode(), Ledger() as ledger:
        shape = torch.zeros(QUARTER, device="meta") + 1
        assert ledger.now == 0
        content = torch.empty_like(shape, device="cpu").zero_()
        assert ledger.now == MIB
        del content
    with Ledger() as ledger:
        shape = torch.zeros(QUARTER, device="meta")
        assert ledger.take_peak().tensors == 0
        del shape


class Low(torch.nn.Linear):
    """Has weights in bf16."""

    def __init__(self) -> None:
        super().__init__(64, 10, dtype=torch.bfloat16)


def test_weights_that_no_run_would_train_are_refused() -> None:
    with pytest.raises(RequestError, match="'weight' is in bfloat16"):
        traced("model=factory", f"model.target={__name__}:Low")


def test_phases_that_a_run_does_not_have_are_left_out() -> None:
    words = ("train.checkpoint_every=null", "train.save_weights=false", "train.eval_every=5")
    assert list(traced(*words).phases) == ["build", "start", "step", "evaluation"]


def test_what_torch_finds_out_on_tensors_of_the_whole_shape_is_not_counted() -> None:
    join_nobody(2)
    try:
        # DTensor looks up an operation's sharding once for a shape, and remembers it.
        config = to_config(compose(["model=mlp", "model.params.hidden_dim=3001", "trainer=fsdp", "backend=eager"]))
        first, second = (trace(config, Workers(0, 2, torch.device("cpu"), 1), SHAPES) for _ in range(2))
    finally:
        dist.destroy_process_group()
    for phase in ("start", "step"):
        assert first.phases[phase].tensors == second.phases[phase].tensors


def test_the_first_worker_alone_copies_the_model_and_collects_the_weights() -> None:
    first, others = (CHECKPOINT, BESIDE, "end"), (OTHERS_CHECKPOINT, OTHERS_BESIDE)
    found = Trace(Parts(0, 0, 0, 0, 0), dict.fromkeys(("step", *others, *first), Use(0, 0)))
    assert found.phases_of(is_first=True) == ["step", *first]
    assert found.phases_of(is_first=False) == ["step", *others]
    alike = Trace(found.parts, dict.fromkeys(("step", *first), Use(0, 0)))
    assert alike.phases_of(is_first=False) == ["step", CHECKPOINT, BESIDE]


def test_a_deterministic_run_writes_to_all_memory_that_it_gets() -> None:
    try:
        # As DeepSpeed's buckets, which are longer than the gradients in them.
        traced("train.deterministic=true")
        assert torch.empty(8).isnan().all()
        with FakeTensorMode(), Ledger() as ledger:
            bucket = torch.empty(QUARTER)
            assert ledger.now == MIB
            del bucket
    finally:
        torch.use_deterministic_algorithms(False)
