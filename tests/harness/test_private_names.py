"""The check for private torch names finds every form of use, and leaves public ops and own names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.private_names import private_torch_names


@pytest.mark.parametrize(
    "line, found",
    [
        ("from torch._ops import OpOverload", "from torch._ops import OpOverload"),
        ("from torch.autograd import _get_sequence_nr", "from torch.autograd import _get_sequence_nr"),
        ("import torch._dynamo", "import torch._dynamo"),
        ("module._parameters.values()", "module._parameters"),
        ("torch._C.DispatchKey", "torch._C"),
        ("getattr(tensor, '_backward_hooks')", "'_backward_hooks'"),
        ("torch.ops._c10d_functional.wait_tensor", "torch.ops._c10d_functional"),
    ],
)
def test_private_names_are_found(line: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(f"import torch\n{line}\n")
    assert private_torch_names(tmp_path) == [f"user.py:2: {found}"]


@pytest.mark.parametrize(
    "text",
    [
        "aten._softmax.default",
        "rule('_softmax')",
        "sys._getframe(1)",
        "from ._torch import OpOverload",
        "class A:\n    def _own(self): ...\nA()._own()",
    ],
)
def test_other_names_pass(text: str, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(text)
    assert private_torch_names(tmp_path) == []


def test_the_file_for_private_names_passes(tmp_path: Path) -> None:
    (tmp_path / "_torch.py").write_text("from torch._ops import OpOverload\n")
    assert private_torch_names(tmp_path) == []
