"""What a rehearsal writes down, and what it refuses."""

from __future__ import annotations

import runpy
from collections.abc import Callable

import networkx
import pytest
import torch

import planner
from planner.errors import RehearsalError, WorkloadError
from planner.fx_graph import to_fx
from planner.plan_types.decisions import Accumulation, Optimizer, Precision
from planner.plan_types.recompute_decisions import Checkpoint
from planner.recording.step_graph import Category, Phase
from planner.virtual_gpu.autocast import Autocast
from planner.workload.workload import workload
from tests.support.workloads import BARE, CARD, EXAMPLES, certifying_graph, plain, transformer, what_if

pytestmark = pytest.mark.slow


def mlp(*, batch: int = 64, width: int = 32) -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    return workload(model, (torch.zeros(batch, width), torch.zeros(batch, 1)), loss_fn=mean_square)


def mean_square(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])


def bytes_of(graph, category: Category) -> int:
    return sum(storage.size_bytes for storage in graph.storages if storage.category is category)


def test_parameters_gradients_and_optimizer_state_are_counted_to_the_byte():
    work = mlp()
    graph = certifying_graph(work, (), BARE)
    parameter_bytes = sum(p.numel() * 4 for p in work.model.parameters())
    assert bytes_of(graph, Category.PARAMETER) == parameter_bytes
    assert bytes_of(graph, Category.GRADIENT) == 2 * parameter_bytes  # of two steps
    assert bytes_of(graph, Category.OPTIMIZER_STATE) == 2 * parameter_bytes
    assert bytes_of(graph, Category.INPUT) == 64 * 33 * 4


def test_ops_know_their_phase_module_source_and_flops():
    graph = certifying_graph(mlp(), (), BARE)
    products = [op for op in graph.ops if op.name == "aten.addmm.default" and op.step == 0]
    assert [op.module for op in products] == ["0", "2"]
    assert [op.flops for op in products] == [2 * 64 * 32 * 32, 2 * 64 * 32 * 1]
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD and op.flops and op.step == 0]
    assert {op.module for op in backward} == {"0", "2"}
    loss = next(op for op in graph.ops if op.name == "aten.mse_loss.default")
    assert "test_recorder.py:" in loss.source
    assert {op.phase for op in graph.ops if "foreach" in op.name} == {Phase.OPTIMIZER}


def test_the_step_is_a_graph_of_fx_whose_edges_are_storages():
    graph = to_fx(plain(mlp()))
    graph.lint()
    products = [node for node in graph.nodes if node.target is torch.ops.aten.addmm.default]
    assert [node.meta["module"] for node in products] == ["0", "2"]
    relu = next(node for node in graph.nodes if node.target is torch.ops.aten.relu.default)
    assert products[0] in relu.all_input_nodes


def test_a_user_can_have_the_recorded_graph():
    work = mlp()
    graph = planner.record(work.model, work.batch, loss_fn=mean_square, gpu="bare")
    assert {node.meta["step"] for node in graph.nodes if node.op == "call_function"} == {0, 1}


def test_the_recorded_graph_is_one_of_networkx_with_bytes_on_nodes_and_edges():
    work = mlp()
    graph = planner.record(work.model, work.batch, loss_fn=mean_square, gpu="bare")
    ops = planner.to_networkx(graph)
    assert networkx.is_directed_acyclic_graph(ops)
    products = [node for node, name in ops.nodes(data="name") if name == "aten.addmm.default"]
    first, last = products[:2]
    assert ops.nodes[first]["module"] == "0" and ops.nodes[first]["phase"] == "forward"
    assert ops.nodes[first]["bytes"] == 64 * 32 * 4 and ops.nodes[first]["flops"] == 2 * 64 * 32 * 32
    assert networkx.has_path(ops, first, last)
    relu = next(node for node in ops.successors(first) if ops.nodes[node]["name"] == "aten.relu.default")
    assert ops.edges[first, relu]["bytes"] == 64 * 32 * 4
    tensors = planner.to_networkx(graph, storages=True)
    size_bytes, _ = networkx.minimum_cut(tensors, first, last, capacity="bytes")
    assert size_bytes == 64 * 32 * 4  # the activation between the layers, once, although relu and backward read it


def test_the_example_for_graphs_finds_the_tensor_between_two_layers():
    example = runpy.run_path(str(EXAMPLES / "recording" / "step_graph.py"))
    graph = example["record"](depth=3, width=8, samples=16)
    ops = planner.to_networkx(graph)
    assert ops.nodes[example["largest_op"](ops)]["bytes"] > 0
    products = [node for node, name in ops.nodes(data="name") if name == "aten.addmm.default"]
    size_bytes, tensors = example["cheapest_checkpoint"](graph, products[0], products[5])
    assert size_bytes == 16 * 8 * 4 and len(tensors) == 1


def test_dropout_and_attention_are_the_kernels_of_the_card():
    work = transformer("roberta", "RobertaForMaskedLM", batch_size=2, seq_len=16, num_hidden_layers=1, vocab_size=64)
    names = {op.name for op in plain(work, card=CARD).ops}
    assert "aten.native_dropout.default" in names
    assert "aten._scaled_dot_product_efficient_attention.default" in names
    halves = {op.name for op in plain(work, (Precision(dtype="bf16"),), card=CARD).ops}
    assert "aten._scaled_dot_product_flash_attention.default" in halves


class OwnRegion(torch.nn.Module):
    """Its forward names CUDA: an autocast region of its own, and a question about the one around it."""

    def __init__(self, region: Callable[[], torch.autocast] | None = None) -> None:
        super().__init__()
        self.linear, self.region = torch.nn.Linear(64, 64), region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.region is not None:
            with self.region():
                return torch.tanh(self.linear(x))
        assert torch.is_autocast_enabled() is torch.is_autocast_enabled("cuda")
        return torch.tanh(self.linear(x)) if torch.is_autocast_enabled() else self.linear(x).exp().exp()


@pytest.mark.parametrize(
    "region",
    [lambda: torch.autocast("cuda", dtype=torch.bfloat16), lambda: torch.cuda.amp.autocast(dtype=torch.bfloat16)],
    ids=["torch.autocast", "torch.cuda.amp"],
)
@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast.*:FutureWarning")
def test_an_autocast_region_of_cuda_is_one_in_the_rehearsal(region):
    ops = _forward_ops(OwnRegion(region), ())
    assert [op.dtype for op in ops if op.name in ("aten.addmm.default", "aten.tanh.default")] == ["bf16", "bf16"]


def test_a_model_that_asks_whether_cuda_casts_gets_a_note():
    names = [op.name for op in _forward_ops(OwnRegion(), (Precision(dtype="bf16"),))]
    assert "aten.tanh.default" in names and "aten.exp.default" not in names
    names = [op.name for op in _forward_ops(OwnRegion(), ())]
    assert "aten.exp.default" in names and "aten.tanh.default" not in names


def _forward_ops(model, decisions):
    work = workload(model, (torch.ones(8, 64),), loss_fn=lambda output, batch: output.float().sum())
    return [op for op in plain(work, decisions).ops if op.phase is Phase.FORWARD]


def test_autocast_keeps_one_cast_of_each_weight_until_the_forward_ends():
    graph = plain(mlp(), (Precision(dtype="bf16"),))
    casts = [storage for storage in graph.storages if storage.category is Category.AUTOCAST]
    assert sorted(storage.size_bytes for storage in casts) == [2, 64, 64, 2048]


def test_autocast_caches_casts_of_fp32_weights_only():
    """As `cached_cast` in ATen/autocast_mode.cpp: no views, no results of ops, nothing without a gradient."""
    weight, autocast, cast = torch.nn.Parameter(torch.ones(4, 4)), Autocast("cpu"), []
    autocast.on_cast = cast.append
    view = torch.zeros(16).view(4, 4).requires_grad_()  # a leaf that is a view
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for tensor in (view, weight * 2, weight.detach(), weight.half().detach().requires_grad_()):
            assert autocast.cast(tensor, torch.bfloat16) is not autocast.cast(tensor, torch.bfloat16)
        assert not cast
        first = autocast.cast([weight], torch.bfloat16)[0]
        assert first is autocast.cast(weight, torch.bfloat16) is cast[0] and len(cast) == 1


def test_a_softmax_of_the_lower_precision_is_computed_in_fp32():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Softmax(1))
    batch = (torch.zeros(64, 32), torch.zeros(64, 32))
    graph = plain(workload(model, batch, loss_fn=mean_square), (Precision(dtype="bf16"),))
    (softmax,) = (op for op in graph.ops if op.name == "aten._softmax.default")
    assert [graph.storages[output].size_bytes for output in softmax.outputs] == [64 * 32 * 4]


def test_eight_bit_state_takes_a_byte_and_a_share_of_absmax_for_each_of_two_moments():
    work = mlp(width=256)
    graph = certifying_graph(work, (Optimizer(),), BARE)
    weight, small = 256 * 256, 256 + 256 + 1
    eight_bit = 2 * (weight + 4 * weight // 256) + 2 * 4 * 256  # and the two quantization maps
    assert bytes_of(graph, Category.OPTIMIZER_STATE) == eight_bit + 2 * 4 * small


def test_fp16_rehearses_with_a_scaler_that_finds_finite_gradients():
    graph = certifying_graph(mlp(), (Precision(dtype="fp16"),), BARE)
    assert any("_amp_foreach_non_finite_check" in op.name for op in graph.ops)
    assert any("_foreach_addcdiv_" in op.name for op in graph.ops)


def test_recomputation_is_distinguished_from_forward_and_backward():
    graph = plain(mlp(), (Checkpoint(modules=("0", "1")),))
    assert [
        op.name for op in graph.ops if op.phase is Phase.RECOMPUTE and op.flops
    ] == []  # early stop: no product again
    deep = torch.nn.Sequential(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]), torch.nn.Linear(8, 1))
    graph = plain(
        workload(deep, (torch.zeros(4, 8), torch.zeros(4, 1)), loss_fn=mean_square), (Checkpoint(modules=("0",)),)
    )
    assert [op.module for op in graph.ops if op.phase is Phase.RECOMPUTE and op.flops] == ["0.0", "0.1"]


def test_micro_batches_are_numbered_and_later_ones_meet_gradients():
    graph = plain(mlp(), (Accumulation(micro_batch_size=16, micro_batches=4),), sizes=(16, 16))
    assert {op.micro_batch for op in graph.ops if op.phase is Phase.FORWARD} == {0, 1}
    accumulated = [op for op in graph.ops if op.name == "aten.add_.Tensor" and op.phase is Phase.BACKWARD]
    assert len(accumulated) == len(list(mlp().model.parameters()))


def test_planning_leaves_the_process_and_the_model_as_they_were():
    work = mlp()
    before = [p.detach().clone() for p in work.model.parameters()]
    state = torch.get_rng_state()
    what_if(work)
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert all(torch.equal(a, b) for a, b in zip(before, work.model.parameters(), strict=True))
    assert all(p.grad is None and p.device.type == "cpu" for p in work.model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in work.model.modules())
    assert torch.equal(state, torch.get_rng_state())


def test_a_parent_that_has_run_a_backward_can_still_rehearse():
    work = mlp()
    mean_square(work.model(work.batch[0]), work.batch).backward()
    assert plain(work).ops


class IntoStorage(torch.nn.Module):
    def forward(self, x):
        halves = x.exp()
        whole = torch.empty(0, dtype=torch.uint8, device=x.device)
        whole = whole.set_(halves.untyped_storage(), 0, (halves.untyped_storage().nbytes(),), (1,))
        return x * whole[:64, None].float()


def test_a_tensor_that_was_set_to_a_storage_does_not_keep_it():
    model = torch.nn.Sequential(torch.nn.Linear(32, 1), IntoStorage())
    graph = plain(workload(model, (torch.zeros(64, 32), torch.zeros(64, 1)), loss_fn=mean_square))
    made = next(op for op in graph.ops if op.name == "aten.exp.default").outputs[0]
    product = next(op for op in graph.ops if op.name == "aten.mul.Tensor")
    assert graph.storages[made].lives[0][1] <= product.tick + 10
    (setting,) = (op for op in graph.ops if "aten.set_" in op.name)
    assert setting.moved_bytes == 0 and setting.scratch_known


class Branching(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        if y.sum() > 0:
            y = y * 2
        return y.mean()


def test_a_branch_on_values_is_refused_with_module_and_line():
    with pytest.raises(RehearsalError, match=r"outside|in module.*test_recorder.py:\d+.*rewrite that line"):
        plain(workload(Branching(), torch.zeros(2, 4)))


def test_a_batch_that_the_model_refuses_is_reported_with_module_and_line():
    with pytest.raises(WorkloadError, match=r"failed with this batch: RuntimeError.*in '0'"):
        plain(
            workload(
                torch.nn.Sequential(torch.nn.Linear(4, 1)), (torch.zeros(2, 5), torch.zeros(2, 1)), loss_fn=mean_square
            )
        )


def test_an_op_without_a_fake_kernel_is_refused_by_its_name_in_backward_too():
    def loss(output, batch):
        return torch.nn.functional.multi_margin_loss(output, batch[-1].long())

    batch = (torch.zeros(4, 8), torch.zeros(4))
    with pytest.raises(RehearsalError, match=r"aten.multi_margin_loss_backward\S* has no fake kernel.*outside"):
        plain(workload(torch.nn.Linear(8, 3), batch, loss_fn=loss))


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_are_rehearsed(kind):
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = kind(12, 16, num_layers=2, batch_first=True)

        def forward(self, x):
            return self.cells(x)[0].square().mean()

    graph = plain(workload(Recurrent(), torch.zeros(4, 5, 12)))
    assert {op.module for op in graph.ops if op.phase is Phase.BACKWARD and op.flops} == {"cells"}


def test_what_torch_compile_took_over_is_rehearsed_as_it_is_without():
    inner = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU())
    names = []
    for middle in (inner, torch.compile(inner)):
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), middle, torch.nn.Linear(32, 1))
        batch = (torch.zeros(8, 32), torch.zeros(8, 1))
        names.append([op.name for op in plain(workload(model, batch, loss_fn=mean_square)).ops])
    assert names[0] == names[1]
