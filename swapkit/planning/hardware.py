"""Devices that are not at hand: how long a step that was recorded elsewhere takes there.

A roofline model: an operator takes the longer of its arithmetic and its memory traffic, plus one
launch. The figures for known devices are in `HARDWARE`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swapkit.errors import InvalidArgument
from swapkit.ir.machines import Machine
from swapkit.ir.traces import Operator, Trace

_ATTENTION = "attention"
GIB = 1 << 30
# Left by `swapkit.budget("auto")` to what takes memory of a GPU or NPU beside the pool, partly only
# later in training: kernels that the driver loads on first use, buffers of NCCL and HCCL, handles
# of libraries.
DEVICE_RESERVE_SHARE, DEVICE_RESERVE_BYTES = 0.04, 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The speed of a device, as training reaches it, not as the data sheet gives it.

    Rates are for two-byte elements. `device`: torch's name for the device type. `memory_bytes`: of
    the device; links: to the host. 0: not known.
    """

    flops_per_second: float  # of matrix products
    attention_flops_per_second: float
    memory_bytes_per_second: float
    launch_seconds: float = 0.0  # added to each operator
    name: str = ""
    device: str = "cuda"
    memory_bytes: int = 0
    out_bytes_per_second: float = 0.0
    in_bytes_per_second: float = 0.0
    duplex: float = 1.6  # as of `Machine`

    def __post_init__(self) -> None:
        """Check the figures.

        Raises:
            InvalidArgument: a figure is out of range.
        """
        for field in ("flops", "attention_flops", "memory_bytes"):
            value = getattr(self, f"{field}_per_second")
            if not value > 0:
                raise InvalidArgument(f"{field}_per_second={value!r}: expected more than 0")
        if not self.launch_seconds >= 0:
            raise InvalidArgument(f"launch_seconds={self.launch_seconds!r}: expected 0 or more")

    @property
    def machine(self) -> Machine | None:
        """The device with what `swapkit.budget("auto")` takes of it; None: no link is known."""
        if not (self.memory_bytes and self.out_bytes_per_second and self.in_bytes_per_second):
            return None
        reserve_bytes = max(DEVICE_RESERVE_BYTES, DEVICE_RESERVE_SHARE * self.memory_bytes)
        return Machine(
            budget_bytes=int(self.memory_bytes - reserve_bytes),
            out_bytes_per_second=self.out_bytes_per_second,
            in_bytes_per_second=self.in_bytes_per_second,
            duplex=self.duplex,
            name=self.name,
        )

    def seconds(self, operator: Operator) -> float:
        """Return the time that an operator takes.

        Raises:
            InvalidArgument: it is not known what the operator does.
        """
        if operator.flops is None or operator.touched_bytes is None:
            raise InvalidArgument(
                f"hardware={self.name!r}: the trace does not say what "
                f"{operator.name or 'an operator'} does, so its time there is not known. Record "
                "the step with this version of swapkit, without torch.compile"
            )
        if operator.flops == operator.touched_bytes == 0:  # a wait, a note of writes
            return operator.seconds
        is_attention = _ATTENTION in operator.name
        rate = self.attention_flops_per_second if is_attention else self.flops_per_second
        moving = operator.touched_bytes / self.memory_bytes_per_second
        return max(moving, operator.flops / rate) + self.launch_seconds


# Rates that training reaches; memory at 90 % of the data sheets.
# H100 SXM: 989 TFLOP/s dense in bfloat16, 3.35 TB/s (NVIDIA H100 data sheet). H200: the same
# arithmetic, 4.8 TB/s (NVIDIA H200 data sheet). A100 SXM 80 GB: 312 TFLOP/s, 2.04 TB/s (NVIDIA
# A100 data sheet). GeForce RTX 4090: 165 TFLOP/s in bfloat16 with sums in float32, 1.01 TB/s
# (NVIDIA Ada GPU architecture). Large matrix products reach about 70 % of the arithmetic. Attention
# forward and backward: FlashAttention-3 on an H100 about 540 TFLOP/s, FlashAttention-2 on an A100
# about 190 (figures of both papers), the same share on a 4090. Ascend 910B: 313 TFLOP/s in half
# precision and 1.6 TB/s, as cloud providers publish for the 910B3; the manufacturer has no public
# data sheet. Links: measured on an H100 (benchmarks/results/h100); PCIe 4.0 x16 reaches half.
# Memory: as torch gives it, less than the data sheet by what the driver takes.
_PCIE_4, _PCIE_5 = (26.0, 26.0), (54.0, 52.0)  # GB/s to the host, and back
_FIGURES = (  # TFLOP/s of products and of attention, TB/s of memory, us of a launch, GiB, link
    ("H100", "cuda", 690.0, 540.0, 3.0, 3.0, 79.0, _PCIE_5),
    ("H200", "cuda", 690.0, 540.0, 4.3, 3.0, 139.0, _PCIE_5),
    ("A100", "cuda", 220.0, 190.0, 1.8, 4.0, 79.0, _PCIE_4),
    ("RTX 4090", "cuda", 115.0, 100.0, 0.9, 3.0, 23.5, _PCIE_4),
    ("Ascend 910B", "npu", 220.0, 160.0, 1.4, 6.0, 61.0, _PCIE_4),
)
HARDWARE: dict[str, Hardware] = {
    name: Hardware(
        name=name,
        device=device,
        flops_per_second=products * 1e12,
        attention_flops_per_second=attention * 1e12,
        memory_bytes_per_second=traffic * 1e12,
        launch_seconds=launch / 1e6,
        memory_bytes=int(memory * GIB),
        out_bytes_per_second=link[0] * 1e9,
        in_bytes_per_second=link[1] * 1e9,
    )
    for name, device, products, attention, traffic, launch, memory, link in _FIGURES
}


def find_hardware(name: object) -> Hardware | None:
    """Return the hardware of a name, in any case, or of its last word ("4090"); None: unknown."""
    for key, each in HARDWARE.items():
        if isinstance(name, str) and name.lower() in {key.lower(), key.lower().split()[-1]}:
            return each
    return None


def hardware_named(hardware: Hardware | str) -> Hardware:
    """Return hardware by its name, as `find_hardware`; return a `Hardware` unchanged.

    Raises:
        InvalidArgument: no hardware has this name.
    """
    if isinstance(hardware, Hardware):
        return hardware
    found = find_hardware(hardware)
    if found is None:
        raise InvalidArgument(
            f"hardware={hardware!r}: expected a Hardware or one of {', '.join(HARDWARE)}"
        )
    return found


def price(trace: Trace, hardware: Hardware, device: str = "") -> Trace:
    """Return a recorded step with the times of its operators on other hardware.

    Waits for other ranks stay as they were recorded: how long these take there is not known.

    Args:
        trace: the step.
        hardware: where it runs.
        device: torch's name for the device; empty: the hardware's.

    Raises:
        InvalidArgument: the trace does not say what an operator does.
    """
    operators = tuple(replace(each, seconds=hardware.seconds(each)) for each in trace.operators)
    device = device or hardware.device
    return replace(trace, operators=operators, step_seconds=0.0, host=None, device=device)
