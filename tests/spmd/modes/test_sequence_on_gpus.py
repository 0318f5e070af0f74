"""Split sequences by the attention kernels of GPUs: their numbers by kernels on the CPU, their programs on fakes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import passes
import spmd
from passes import Program
from passes.schedule.happens_before import check_streams
from passes.schedule.streams import assign_streams
from tests.harness.fake import fake_world
from tests.harness.gpu_attention import CUDNN, EFFICIENT, FLASH, kernels_of_gpus
from tests.harness.on_cuda import OnCuda
from tests.spmd.annotations.test_offload import Seen

pytestmark = pytest.mark.slow
WIDTH, HEADS = 16, 2
CONTEXT = {"axes": {"sequence": "cp"}}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with kernels_of_gpus():
        yield


class Net(nn.Module):
    """Causal attention by a kernel of a GPU, which takes no double precision."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).float().chunk(3, -1))
        more = () if self.kernel == FLASH else (None, True)
        seen = getattr(torch.ops.aten, self.kernel)(q, k, v, *more, 0.0, True)[0]
        return x + self.out(seen.transpose(1, 2).flatten(2).to(x.dtype))


def train(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), x.roll(1, 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(kernel: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Net(kernel).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3), torch.randn(2, 96, WIDTH).double()


@pytest.mark.parametrize("kernel, mode", [
    (FLASH, {"attention": "ring"}),
    (CUDNN, {"attention": "gather"}),
    (EFFICIENT, {"attention": "ring", "balance": False}),
])  # fmt: skip
def test_the_numbers_are_those_of_the_kernel_on_whole_sequences(kernel: str, mode: Any) -> None:
    step = spmd.compile(train, parallel_mode=spmd.DataParallel(**CONTEXT, **mode))
    assert spmd.verify(step, *arguments(kernel), mesh={"cp": 3}, world=3, steps=2)


@pytest.mark.parametrize("form", ["gather", "ring"])
def test_a_program_for_gpus_has_no_race(form: Any) -> None:
    """On fake tensors: what is computed with keys that have come waits for them alone."""
    seen: list[Program] = []
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        mode = OnCuda(mesh=mesh, attention=form, **CONTEXT)
        step = spmd.compile(train, parallel_mode=mode, passes=[*passes.default(), Seen(seen)])
        with pytest.raises(spmd.PassError, match="seen"):
            step(*arguments(FLASH))
    program, *_ = seen  # passes run once more behind one that raises
    calls = [node for node in program.graph.nodes if "_scaled_dot_product_flash" in str(node.target)]
    assert len(calls) == {"gather": 2 * 2 * 2, "ring": 2 * 2}[form]
    assert {each.device.type for node in calls for each in node.meta["val"][:2]} == {"cuda"}
    check_streams(program, assign_streams(program))
