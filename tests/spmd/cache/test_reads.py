"""What a step may read, one kind a case: with another value it finds no entry; what nobody can compare has none."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import spmd
from spmd import capture_call
from spmd.cache.described import Describer
from spmd.cache.not_cached import NotCachedError

from .trainer import TracedError

pytestmark = pytest.mark.slow

STEP = """
import torch
from torch import nn
from torch.nn import functional as F
{code}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        if "prepare" in globals():
            prepare(self)

    def forward(self, x):
        return self.linear(x) * read(self)


def step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss
"""
CONFIG = """
class Config:
    def __init__(self, gain):
        self.gain = gain
"""

COPIED = f"""
import copy
{CONFIG}

def prepare(net):
    net.config = Config(1.0)
    net.config.names = {{0: "a"}}

def read(net):
    config = copy.HOW(net.config)
    return config.gain * len(config.names)
"""

# What the step's file defines, and a statement that changes what ``read`` gives.
COMPARED = {
    "a copy": (COPIED.replace("HOW", "copy"), "net.config.gain = 2.0"),
    "a copy that has a dict in common": (COPIED.replace("HOW", "copy"), "net.config.names[1] = 'b'"),
    "a deep copy": (COPIED.replace("HOW", "deepcopy"), "net.config.gain = 2.0"),
    "a dict of a deep copy": (COPIED.replace("HOW", "deepcopy"), "net.config.names[1] = 'b'"),
    "one object under two names, then two": (
        CONFIG
        + """
def prepare(net):
    net.one = net.other = Config(1.0)

def read(net):
    return net.one.gain * net.other.gain
""",
        "net.other = m.Config(2.0)",
    ),
    "two objects, then one": (
        "A, B = [], []\ndef read(net):\n    return 1.0 if A is B else 2.0",
        "m.B = m.A",
    ),
    "two tensors, then one": (
        "A, B = torch.tensor(1.0), torch.tensor(1.0)\ndef read(net):\n    return (1.0 if A is B else 2.0) * A * B",
        "m.B = m.A",
    ),
    "an attribute of a number": (
        "class Number(float): pass\nN = Number(1.0)\nN.gain = 1.0\ndef read(net):\n    return N.gain * 1.0",
        "m.N.gain = 2.0",
    ),
    "a name that a module lacks": (
        "def read(net):\n    try:\n        return NEW\n    except NameError:\n        return 1.0",
        "m.NEW = 2.0",
    ),
    "a docstring": ("def f():\n    '1'\ndef read(net):\n    return float(f.__doc__)", "m.f.__doc__ = '2'"),
    "a default of a method by which an object is called": (
        "L = [1.0]\nclass Gain:\n    def __call__(self, of=L):\n        return of[0]\nG = Gain()\n"
        "def read(net):\n    return G()",
        "m.L[0] = 2.0",
    ),
    "a closure of such a method": (
        "def make(g):\n    class Gain:\n        def __call__(self):\n            return g\n    return Gain()\n"
        "G = make(1.0)\ndef read(net):\n    return G()",
        "m.G = m.make(2.0)",
    ),
    "an object in a closure of such a method": (
        CONFIG + "def make(config):\n    class Gain:\n        def __call__(self):\n            return config.gain\n"
        "    return Gain()\nG = make(Config(1.0))\ndef read(net):\n    return G()",
        "m.G = m.make(m.Config(2.0))",
    ),
    "minus zero": ("import math\nZ = 0.0\ndef read(net):\n    return 2.0 + math.copysign(1.0, Z)", "m.Z = -0.0"),
    "what a partial and a method are made of": (
        "from functools import partial\nclass C:\n    def same(self, a, b):\n        return 1.0 + (a is b)\n"
        "O = C()\nF = partial(O.same, O, O)\ndef read(net):\n    return F()",
        "m.F = m.partial(m.O.same, m.O, m.C())",
    ),
    "functions that are keys": (
        "f, g = [(lambda: 0.0) for _ in 'ab']\nD = {f: 1.0, g: 2.0}\ndef read(net):\n    return D[f]",
        "m.f, m.g = m.g, m.f",
    ),
    "the order of an OrderedDict": (
        "import collections\nD = collections.OrderedDict(a=1.0, b=2.0)\ndef read(net):\n    return [*D.values()][0]",
        "m.D.move_to_end('a')",
    ),
    "the buffers that are no part of a checkpoint": (
        "def prepare(net):\n    net.register_buffer('b', torch.ones(1))\n"
        "def read(net):\n    return len(net.state_dict())",
        "net.register_buffer('b', net.b, persistent=False)",
    ),
    "where a tensor lies": (
        "T = torch.ones(4)[1:]\ndef read(net):\n    return 1.0 + T.storage_offset()",
        "m.T = torch.ones(5)[2:]",
    ),
    "the order of a dict": (
        "D = {'a': 1.0, 'b': 2.0}\ndef read(net):\n    return list(D.values())[0]",
        "m.D.clear(); m.D.update(b=2.0, a=1.0)",
    ),
    "a base class": (
        "class A: gain = 1.0\nclass B: gain = 2.0\nclass C(A): pass\nO = C()\ndef read(net):\n    return O.gain",
        "m.C.__bases__ = (m.B,)",
    ),
    "the keys of a dict that is called as torch's dicts of hooks are": (
        "def prepare(net):\n    net.my_hooks = {'a': 1.0, 'b': 2.0}\ndef read(net):\n    return net.my_hooks['a']",
        "net.my_hooks = {'b': 1.0, 'a': 2.0}",
    ),
    "the end of a long pattern": (
        "import re\nP = re.compile('z' * 300 + '|a')\ndef read(net):\n    return 1.0 if P.match('a') else 2.0",
        "m.P = m.re.compile('z' * 300 + '|b')",
    ),
    "the members of an enum": (
        "import enum\nclass E(enum.Enum):\n    A = 1.0\ndef read(net):\n    return sum(each.value for each in E)",
        "m.E.A._value_ = 2.0",
    ),
    "the metadata of fields": (
        "from dataclasses import dataclass, field, fields\nM = {'gain': 1.0}\n"
        "@dataclass\nclass C:\n    a: int = field(default=1, metadata=M)\n"
        "def read(net):\n    return sum(each.metadata['gain'] for each in fields(C))",
        "m.M['gain'] = 2.0",
    ),
    "annotations": (
        "import typing\nclass C:\n    a: typing.Annotated[float, 1.0]\n"
        "def read(net):\n    return typing.get_type_hints(C, include_extras=True)['a'].__metadata__[0]",
        "m.C.__annotations__['a'] = m.typing.Annotated[float, 2.0]",
    ),
    "an attribute with underscores": (
        "def prepare(net):\n    net.__gain__ = 1.0\ndef read(net):\n    return net.__gain__",
        "net.__gain__ = 2.0",
    ),
    "what a dict makes of missing keys": (
        "import collections, functools\nD = collections.defaultdict(functools.partial(float, '1'))\n"
        "def read(net):\n    return D.default_factory()",
        "m.D.default_factory = m.functools.partial(float, '2')",
    ),
    "a list of a class's class": (
        "class M(type): pass\nclass C(metaclass=M): pass\nM.gain = [1.0]\ndef read(net):\n    return C.gain[0]",
        "m.M.gain[0] = 2.0",
    ),
    "how long a deque may be": (
        "import collections\nD = collections.deque([1.0], 2)\ndef read(net):\n    return D.maxlen",
        "m.D = m.collections.deque([1.0], 3)",
    ),
    "a global of code that has no file": (
        "exec(compile('G = 1.0\\ndef read(net):\\n    return G', '<made>', 'exec'), globals())",
        "m.G = 2.0",
    ),
}
# What makes a step one that is not kept, with the reason.
NOT_KEPT = {
    "the environment": ("import os\ndef read(net):\n    return float(os.environ.get('GAIN', '1'))", "os.environ"),
    "the environment as a default": (
        "import os\ndef read(net, of=os.environ):\n    return float(of.get('GAIN', '1'))",
        "reads a os._Environ",
    ),
    "a file": ("def read(net):\n    return float(open('/proc/self/stat').read()[0] != '')", r"open\(\)"),
    "a path": ("from pathlib import Path\ndef read(net):\n    return float(Path('/').exists())", "pathlib.Path"),
    "a module behind torch": ("def read(net):\n    return float(len(torch.sys.argv) > 0)", "sys.argv"),
    "the rank": ("import torch.distributed as dist\ndef read(net):\n    return dist.get_rank() + 1.0", "get_rank"),
    "an object that a closure hides": (
        CONFIG
        + """
def make(config):
    class Gain:
        def __init__(self):
            self.gain = config.gain
    return Gain

G = make(Config(1.0))

def read(net):
    return G().gain
""",
        "reads a Config in its closure",
    ),
    "the attributes of a module": (
        "def prepare(net):\n    net.gain = 1.0\ndef read(net):\n    return vars(net)['gain']",
        r"vars\(\)",
    ),
    "the attributes of a module as a dict": (
        "def prepare(net):\n    net.gain = 1.0\ndef read(net):\n    return net.__dict__['gain']",
        "__dict__",
    ),
    "objects that are keys": (
        "class C: pass\nA, B = C(), C()\nD = {(A, 1): 1.0, (B, 1): 2.0}\ndef read(net):\n    return D[A, 1]",
        "no path from the step leads to the class of a key",
    ),
    "an object in a set": (
        "class C: pass\nA = C()\nS = {A}\ndef read(net):\n    return 1.0 + (A in S)",
        "dict or set of C",
    ),
    "a cache with values": (
        "import functools\n@functools.lru_cache\ndef f():\n    return 1.0\nf()\ndef read(net):\n    return f()",
        "has cached values",
    ),
    "registered classes": (
        "import abc\nclass A(abc.ABC): pass\nclass B: pass\nA.register(B)\nO = B()\n"
        "def read(net):\n    return 1.0 if isinstance(O, A) else 2.0",
        "classes are registered with A",
    ),
    "an object made in C": (
        "import threading\nL = threading.local()\nL.gain = 1.0\ndef read(net):\n    return L.gain",
        "_thread._local",
    ),
    "a name that is computed": (
        "class C: gain = [1.0]\nN = 'niag'\ndef read(net):\n    return getattr(C, N[::-1])[0]",
        "calls getattr with a name",
    ),
    "getattr that is passed on": (
        "class C: gain = [1.0]\ndef read(net):\n    return [*map(getattr, [C], ['gain'])][0][0]",
        "calls getattr with a name",
    ),
    "attrgetter": (
        "import operator\nclass C: gain = 1.0\ndef read(net):\n    return operator.attrgetter('gain')(C)",
        "names attrgetter",
    ),
    "an import when it is called": (
        "def read(net):\n    import spmd_gain\n    return spmd_gain.GAIN",
        "imports spmd_gain",
    ),
    "code that has neither a file nor a module": (
        "N = {'G': 1.0}\nexec(compile('def f():\\n    return G', '<made>', 'exec'), N)\nf = N['f']\n"
        "def read(net):\n    return f()",
        "neither a file nor a module",
    ),
    "an attribute in a text": (
        "class C: gain = [1.0]\ndef read(net):\n    return float('{0.gain[0]}'.format(C))",
        "formats a text",
    ),
    "a level of logging": (
        "import logging\ndef read(net):\n    return float(logging.getLogger('x').isEnabledFor(20))",
        "getLogger",
    ),
    "the order of a set": ("S = {'a', 'b'}\ndef read(net):\n    return 1.0 if [*S][0] == 'a' else 2.0", "reads a set"),
    "the seed": (
        "from torch.random import initial_seed\ndef read(net):\n    return 1.0 + initial_seed() % 2",
        "initial_seed",
    ),
    "a hash by another name": ("h = hash\ndef read(net):\n    return 1.0 + h('a') % 2", r"hash\(\)"),
}


def start(folder: Path, code: str) -> tuple[ModuleType, Any]:
    (folder / "reading_step.py").write_text(STEP.format(code=code))
    importlib.invalidate_caches()
    sys.modules.pop("reading_step", None)
    module = importlib.import_module("reading_step")
    torch.manual_seed(0)
    return module, module.Net()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("reading_step", None)


def refuse(*_: Any) -> Any:
    raise TracedError


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", COMPARED)
def test_with_another_value_there_is_no_entry(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (code, change), x = COMPARED[kind], torch.ones(4, 3)
    for statement, finds in ((None, False), ("", True), (change, False)):
        module, net = start(folder, code)
        step = spmd.compile(module.step, cache=folder / "cache")
        if statement is None:
            step(net, x)
            monkeypatch.setattr(capture_call, "capture", refuse)
            continue
        exec(statement, {"m": module, "net": net, "torch": torch})
        if finds:
            step(net, x)
        else:
            with pytest.raises(TracedError):
                step(net, x)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", NOT_KEPT)
def test_what_no_other_process_can_compare_is_not_kept(folder: Path, kind: str) -> None:
    code, reason = NOT_KEPT[kind]
    (folder / "spmd_gain.py").write_text("GAIN = 1.0")
    module, net = start(folder, code)
    step = spmd.compile(module.step, cache=folder / "cache")
    step(net, torch.ones(4, 3))
    (note,) = [note for note in step.report().notes if note.startswith("not kept for later processes")]
    assert re.search(reason, note), note
    assert not os.listdir(folder / "cache")


@pytest.mark.usefixtures("alone")
def test_a_later_size_has_the_reason_of_the_trace_that_serves_it(folder: Path) -> None:
    code, reason = NOT_KEPT["a file"]
    module, net = start(folder, code)
    step = spmd.compile(module.step, cache=folder / "cache")
    for rows in (4, 5, 6):  # one trace for the last two
        step(net, torch.ones(rows, 3))
        assert re.search(reason, " ".join(step.report().notes))
    step = spmd.compile(module.step, parallel_mode=spmd.Auto(), cache=folder / "cache")
    step(net, torch.ones(4, 3))
    assert "not kept for later processes: Auto chooses a style in each process" in step.report().notes


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("scale", ["optimizer.defaults['lr']", "optimizer.param_groups[0]['initial_lr']"])
def test_numbers_that_only_schedulers_change_are_not_kept(folder: Path, scale: str) -> None:
    code = f"def read(net):\n    return 1.0\ndef trained(net, optimizer, x):\n    return step(net, x * {scale})"
    module, net = start(folder, code)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    optimizer.param_groups[0]["initial_lr"] = 0.5
    step = spmd.compile(module.trained, cache=folder / "cache")
    step(net, optimizer, torch.ones(4, 3))
    assert re.search("whose numbers are not compared", " ".join(step.report().notes))


@pytest.mark.usefixtures("alone")
def test_getattr_with_constant_names_is_kept(folder: Path) -> None:
    code = "def read(net):\n    return getattr(net, 'gain', 1.0) if hasattr(net, 'linear') else 2.0"
    module, net = start(folder, code)
    spmd.compile(module.step, cache=folder / "cache")(net, torch.ones(4, 3))
    assert os.listdir(folder / "cache")


@pytest.mark.usefixtures("alone")
def test_hooks_on_saved_tensors_are_not_there_in_an_entry(folder: Path) -> None:
    module, net = start(folder, "def read(net):\n    return 1.0")
    spmd.compile(module.step, cache=folder / "cache")(net, torch.ones(4, 3))
    module, net = start(folder, "def read(net):\n    return 1.0")
    step = spmd.compile(module.step, cache=folder / "cache")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x):
        step(net, torch.ones(4, 3))
    assert "hooks on saved tensors" in "".join(step.report().notes)


FLAGS = """
def prepare(net):
    net.is_ready, net.kind, net.gain = False, None, 2.0

def read(net):
    if net.kind is None:
        net.kind = "regression"
    if not net.is_ready:
        net.is_ready = True
        return 3.0
    return net.gain
"""


@pytest.mark.usefixtures("alone")
def test_flags_and_texts_that_a_step_writes_are_written_by_a_warm_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between calls one is set back, so that its program runs again."""
    seen = []
    for _ in range(2):
        module, net = start(folder, FLAGS)
        torch.manual_seed(0)
        torch.nn.init.ones_(net.linear.weight)
        step = spmd.compile(module.step, cache=folder / "cache")
        seen.append([])
        for call in range(4):
            if call == 2:
                net.is_ready = False
            loss = step(net, torch.ones(4, 3)).item()
            seen[-1].append((loss, net.is_ready, net.kind, net.linear.weight.grad.tolist()))
        monkeypatch.setattr(capture_call, "capture", refuse)
    assert seen[0] == seen[1] and [kind for _, _, kind, _ in seen[0]] == ["regression"] * 4
    assert seen[0][0][0] != seen[0][1][0]


def test_what_a_library_holds_is_compared_as_far_as_that_is_possible() -> None:
    lock, describer = threading.Lock(), Describer({})
    with pytest.raises(NotCachedError):
        describer.of([1.0, lock])
    held = {"scale": 1.0, "all": {lock, 2.0}}
    assert describer.in_parts(held) == describer.in_parts({"scale": 1.0, "all": {2.0, threading.Lock()}})
    for other in ({"scale": 2.0, "all": {lock, 2.0}}, {"scale": 1.0, "all": {lock, 3.0}}, {"scale": 1.0}):
        assert describer.in_parts(held) != describer.in_parts(other)


COUNTED = """
CALLS = 0

def prepare(net):
    net.mean, net.calls = 0.5, 1

def read(net):
    global CALLS
    net.calls += 1
    if net.calls > 8:
        return 0.0
    CALLS = CALLS + 2
    net.mean = 0.9 * net.mean + 0.1 * net.linear.weight.sum().item()
    return 1.0 + net.mean + 1.0 / net.calls + CALLS
"""


@pytest.mark.usefixtures("alone")
def test_numbers_that_a_step_keeps_are_inputs_of_a_warm_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process begins with others."""
    seen = []
    for begins in (1, 5, 1):
        module, net = start(folder, COUNTED)
        torch.nn.init.ones_(net.linear.weight)
        step = spmd.compile(module.step, cache=folder / "cache")
        net.calls, seen = begins, [*seen, []]
        for _ in range(3):
            loss = step(net, torch.ones(4, 3)).item()
            net.zero_grad()
            seen[-1].append((loss, net.calls, net.mean, module.CALLS))
        monkeypatch.setattr(capture_call, "capture", refuse)
    assert seen[0] == seen[2] != seen[1]
    assert [calls for _, calls, _, _ in seen[1]] == [6, 7, 8]
    plain_module, plain = start(folder, COUNTED)
    torch.nn.init.ones_(plain.linear.weight)
    for loss, *kept in seen[0]:
        assert plain_module.step(plain, torch.ones(4, 3)).item() == pytest.approx(loss, rel=1e-6)
        assert [plain.calls, plain_module.CALLS] == [kept[0], kept[2]]
    for other in (8, 1.5):  # another branch, another type
        net.calls = other
        with pytest.raises(TracedError):
            spmd.compile(module.step, cache=folder / "cache")(net, torch.ones(4, 3))
