"""A row of a table of published runs as the project sees it: the work of its model, its layout, and its machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from passes.schedule.gpus import GPUS
from spmd.planning.estimate import Estimate, State, Traffic, Work, estimate
from spmd.planning.fitted import CONSTANTS
from spmd.planning.layout import Layout, Recompute, Style
from spmd.planning.machine import Constants, Machine, Software

from .fitted import SOFTWARE
from .models import Dims, workload

GROUPS = {
    "vtrain-multi": "deepspeed",
    "vtrain-single": "deepspeed",
    "llm-foundry": "foundry",
    "nanotron": "nanotron",
    "megatron-lm": "megatron",
    "megatron-bridge": "megatron",
    "nemo-automodel": "megatron",
    "fms-fsdp": "compiled",
}
# vTrain's hosts: their simulator counts 800 Gb/s for eight GPUs.
_NETWORK = {"vtrain-multi": 12.5, "vtrain-single": 12.5}
_DEEPEP = 0.92  # of the network: it publishes 46 of 50 GB/s
_WIDE = 128  # the head dim at which attention's constants are given
_BITS = {"bf16": 16, "bf16-pure": 16, "fp16": 16, "nvfp4": 4}  # fp8 in all its forms otherwise


class UnknownError(Exception):
    """A row that cannot be estimated, with the reason."""


@dataclass(frozen=True)
class Row:
    """One published run."""

    cells: Mapping[str, str]

    def number(self, name: str, otherwise: int = 1) -> int:
        """A whole number of the row; ``otherwise`` for an empty cell."""
        return int(float(self.cells.get(name) or otherwise))

    @property
    def id(self) -> str:
        """Its name in the table."""
        return self.cells["id"]

    @property
    def seconds(self) -> float:
        """Measured seconds of a step."""
        return float(self.cells["step_s"])

    @property
    def speed(self) -> float:
        """Measured tokens for each GPU and second."""
        return self.tokens / self.seconds

    @property
    def tokens(self) -> float:
        """Tokens of a step for each GPU."""
        return self.number("global_batch") * self.number("seq_len") / self.number("gpus")

    @property
    def framework(self) -> str:
        """The software that ran it."""
        name = "experts" if self.cells.get("experts") else GROUPS.get(self.cells["group"])
        if name == "experts" and self.cells["group"] == "megatron-bridge" and self.cells["date"] >= "26.06":
            return "graphed experts"
        return name or ("eager" if self.cells["compile"] == "0" else "compiled")

    @property
    def dims(self) -> Dims:
        """The sizes of its model."""
        number, is_vtrain = self.number, self.cells["group"].startswith("vtrain")
        experts, heads = number("experts", 0), number("heads")
        return Dims(
            self.cells["arch"],
            number("hidden"),
            number("expert_ffn" if experts else "ffn"),
            heads,
            number("kv_heads", heads),
            number("head_dim", number("hidden") // heads),
            51_200 if is_vtrain else number("vocab"),
            number("seq_len"),
            experts,
            number("top_k", 0),
            experts // self.expert_ranks,
            flash=not is_vtrain,
        )

    def work(self) -> Work:
        """The model's work, whose two captured blocks stand for all."""
        dims, tokens = self.dims, self.number("seq_len")
        plain, fused = workload(dims, self.number("tp"), tokens, self.number("layers"))
        traffic = Traffic(
            tokens * dims.top_k * dims.hidden * 2 if dims.experts else 0.0,
            max(1, dims.top_k),
            tokens * 2 * dims.kv_heads * dims.head_dim * 2 / self.number("tp") if self.number("cp") > 1 else 0.0,
        )
        return Work(plain, fused, self.state, traffic, self.is_tied)

    @property
    def is_tied(self) -> bool:
        """Whether the head shares the embedding."""
        return self.cells["tied"] == "1" or self.framework in ("deepspeed", "foundry")

    @property
    def state(self) -> State:
        """Bytes of a number's copies: masters are float32, but where all is bfloat16."""
        if self.cells["precision"] == "bf16-pure":
            return State(2, 2, 4)
        if self.cells["sharding"].startswith("FSDP"):
            return State(2, 4 if "FSDP2" in self.cells["sharding"] else 2, 12)
        return State(2, 2, 16) if self.framework == "deepspeed" else State(2, 4, 12)  # gradients are copied as float32

    def layout(self) -> Layout:
        """Its layout. Raises ``UnknownError`` where the row does not say it."""
        number, cells = self.number, self.cells
        tensor, stages, context = number("tp"), number("pp"), number("cp")
        gpus, rows = number("gpus"), number("micro_batch")
        data = gpus // (tensor * stages)
        own = max(1, number("global_batch") * context // data)
        chunks = number("vp", 2 if cells["schedule"].startswith("Interleaved") else 1)
        if stages > 1 and not cells["micro_batch"] and cells["sharding"].startswith("FSDP"):
            rows = max(1, own // (stages * chunks))  # torchtitan's default: as many micro-batches as chunks
        count = number("grad_accum", 0) or max(1, own // rows)
        return Layout(
            gpus,
            self.style,
            rows / context,
            count,
            tensor,
            stages,
            chunks,
            context,
            self.expert_ranks,
            number("dp_shard") * context if cells["sharding"].startswith("FSDP") else None,
            splits_sequence=cells["seq_parallel"] == "1" or (self.framework == "megatron" and tensor > 1),
            recompute=self.recompute,
            bits=_BITS.get(cells["precision"], 8),
            keeps_gathered="SHARD_GRAD_OP" in cells["sharding"] or stages > 1,
            reduces_once=stages > 1,
        )

    @property
    def expert_ranks(self) -> int:
        """Ranks that divide experts: all that divide parameters, where it sends tokens by DeepEP and says no number."""
        return self.number("ep", self.number("dp_shard") if self.uses_deepep else 1)

    @property
    def uses_deepep(self) -> bool:
        """Whether tokens go to experts by the kernels of DeepEP."""
        return "DeepEP" in self.cells.get("note", "")

    @property
    def recompute(self) -> Recompute:
        """What backward computes again."""
        stated = self.cells["ac"]
        return "full" if stated == "full" else "selective" if stated.startswith("selective") else "none"

    @property
    def style(self) -> Style:
        """How state is split."""
        sharding = self.cells["sharding"]
        if sharding.startswith("FSDP"):
            return "fully_shard"
        if (
            "dist-opt" in sharding
            or "ZeRO-1" in sharding
            or "Megatron-FSDP" in sharding
            or self.framework in ("megatron", "experts")
        ):
            return "shard_optimizer"
        return "replicate"

    def machine(self, constants: Constants, software: Mapping[str, Software]) -> Machine:
        """The machine it ran on."""
        stated = self.cells["gpu"]
        name = {"A100-40GB": "A100-40", "A100-80GB": "A100"}.get(stated, stated.partition("-")[0])
        if name not in GPUS:
            raise UnknownError(f"no figures of {stated}")
        gpu, limited = GPUS[name], "96GB" in stated
        if limited:
            gpu = replace(gpu, memory=2.4, capacity=96, power=500 / 700)
        framework = software[self.framework]
        if self.cells.get("experts"):  # these kernels follow the exponentials of scores, not their width
            framework = replace(framework, attention=framework.attention * self.dims.head_dim / _WIDE)
        if self.uses_deepep:
            framework = replace(framework, tokens=_DEEPEP)
        if self.cells["async_tp"] == "1":
            framework = replace(framework, exposed=0.4)
        network = _NETWORK.get(self.cells["group"])
        return Machine(gpu, name, gpu.domain, framework, constants, network)

    @property
    def kind(self) -> tuple[str, ...]:
        """What machines of rows differ in."""
        group = "vtrain" if self.cells["group"] in _NETWORK else ""
        width = str(self.dims.head_dim) if self.cells.get("experts") else ""
        return self.framework, self.cells["gpu"], self.cells["async_tp"], group, width, str(self.uses_deepep)

    def estimate(self, machine: Machine | None = None) -> Estimate:
        """The estimated step, by default on its machine with the fitted constants."""
        if self.cells["class"] == "other":
            raise UnknownError("fine-tuning of adapters is not modelled")
        return estimate(self.work(), self.layout(), machine or self.machine(CONSTANTS, SOFTWARE))
