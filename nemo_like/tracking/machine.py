"""What a process takes of its machine: memory, processor, and the state of its GPU."""

from __future__ import annotations

import functools
import logging
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from nemo_like.core.errors import MissingExtraError
from nemo_like.core.extras import require

logger = logging.getLogger(__name__)

FIGURES = {
    "rss_gb": "memory of the process",
    "rss_peak_gb": "most memory of the process since it started",
    "private_gb": "memory of the process without pages of files, which the system can take back",
    "host_available_gb": "memory of the machine (or the container) that is left",
    "cpu_percent": "processor time of the process; 100 is one core",
    "host_cpu_percent": "processor time of the whole machine; 100 is all cores",
    "device_allocated_gb": "memory of tensors on the device",
    "device_reserved_gb": "memory of the device that torch holds",
    "device_peak_gb": "most memory of tensors since the last record",
    "device_temperature_c": "temperature of the device",
    "device_power_w": "power of the device",
    "device_utilization_percent": "share of the time in which the device computed something",
    "device_throttle": "why the device is slower than it could be: a bit for each reason, 0 is none",
}
"""What :class:`Meter` reads, in order; what there is not on a machine is nan. GB are 1e9 bytes."""
_GB = 1e9
# Reading a GPU's sensors can take a millisecond; they do not change faster than this.
_SENSORS_EVERY_S = 5.0
# Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML's manual); idle clocks, and those that a user has set, are none.
THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
# What version 1 of control groups says where there is no limit is above.
_NO_LIMIT = 2**60
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


class Meter:
    """Reads the figures of this process; a reading takes a few tenths of a millisecond.

    Args:
        device: Where the process computes.
    """

    def __init__(self, device: torch.device) -> None:
        import psutil

        self.device = device
        self._psutil, self._process = psutil, psutil.Process()
        self._sensors = Sensors.find(device)
        # The first answers are no figures: they cover the time since the last question.
        self._process.cpu_percent()
        psutil.cpu_percent()

    def read(self) -> dict[str, float]:
        """All of ``FIGURES``; the peak of the device's memory begins anew."""
        memory = self._process.memory_info()
        # Linux knows which part belongs to files; elsewhere all counts.
        files = getattr(memory, "shared", 0)
        figures = {
            "rss_gb": memory.rss / _GB,
            "rss_peak_gb": max(measure_peak_bytes(torch.device("cpu")), memory.rss) / _GB,
            "private_gb": (memory.rss - files) / _GB,
            "host_available_gb": measure_available_bytes() / _GB,
            "cpu_percent": self._process.cpu_percent(),
            "host_cpu_percent": self._psutil.cpu_percent(),
        }
        if self.device.type == "cuda":
            figures |= {
                "device_allocated_gb": torch.cuda.memory_allocated(self.device) / _GB,
                "device_reserved_gb": torch.cuda.memory_reserved(self.device) / _GB,
                "device_peak_gb": torch.cuda.max_memory_allocated(self.device) / _GB,
            }
            torch.cuda.reset_peak_memory_stats(self.device)
        if self._sensors is not None:
            figures |= self._sensors.read()
        return {name: figures.get(name, float("nan")) for name in FIGURES}


class Sensors:
    """Temperature, power, load and clocks of a GPU, through NVIDIA's management library.

    Args:
        nvml: The module ``pynvml``, initialised.
        handle: NVML's, of the device.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._last: dict[str, float] = {}
        self._read_s = float("-inf")

    @classmethod
    def find(cls, device: torch.device) -> Sensors | None:
        """Those of a device; None where it is no GPU of NVIDIA, or its driver does not answer."""
        if device.type != "cuda" or torch.version.cuda is None:
            return None
        try:
            nvml: Any = require("pynvml")
        except MissingExtraError as error:
            logger.info("no temperature and power of the GPU are recorded: %s", error)
            return None
        try:
            nvml.nvmlInit()
            # By its identity: CUDA_VISIBLE_DEVICES gives devices other numbers than NVML.
            identity = str(torch.cuda.get_device_properties(device).uuid)
            name = identity if identity.startswith(("GPU-", "MIG-")) else f"GPU-{identity}"
            return cls(nvml, nvml.nvmlDeviceGetHandleByUUID(name))
        except nvml.NVMLError as error:
            logger.info("no temperature and power of the GPU are recorded: %s", error)
            return None

    def read(self) -> dict[str, float]:
        """The sensors that this device has; at most every few seconds anew."""
        now, nvml = time.monotonic(), self._nvml
        if now - self._read_s < _SENSORS_EVERY_S:
            return self._last
        figures: dict[str, float] = {}
        with suppress(nvml.NVMLError):
            figures["device_temperature_c"] = nvml.nvmlDeviceGetTemperature(
                self._handle, nvml.NVML_TEMPERATURE_GPU
            )
        with suppress(nvml.NVMLError):
            figures["device_power_w"] = nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
        with suppress(nvml.NVMLError):
            figures["device_utilization_percent"] = nvml.nvmlDeviceGetUtilizationRates(
                self._handle
            ).gpu
        with suppress(nvml.NVMLError):
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            figures["device_throttle"] = sum(bit for bit in THROTTLES if reasons & bit)
        self._last, self._read_s = figures, now
        return figures


def name_throttles(bits: float) -> str:
    """``power cap, temperature (hardware)``; nothing for 0 and nan."""
    if bits != bits:
        return ""
    return ", ".join(name for bit, name in THROTTLES.items() if int(bits) & bit)


def measure_available_bytes() -> int:
    """Memory that this process could still take: of the machine, and of its container if that has less."""
    import psutil

    there = int(psutil.virtual_memory().available)
    return min([there, *filter(None, map(_measure_left, find_memory_groups()))])


@functools.cache
def find_memory_groups(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[Path]:
    """The control groups around this process that have a limit to their memory, as their folders.

    Args:
        root: Where the groups of the system are mounted.
        own: Which ones this process belongs to; see cgroups(7).
    """
    found: list[Path] = []
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "memory" if controllers else root
            inner = top / path.lstrip("/")
            # In a container its own group is mounted at the top, whatever its path says.
            folders = {top, inner, *(it for it in inner.parents if top in it.parents)}
            found += sorted(it for it in folders if _measure_left(it) is not None)
    return found


def _measure_left(folder: Path) -> int | None:
    """What a control group may still take; None where it has no limit."""
    for limit_name, used_name in _CGROUP_FILES:
        with suppress(OSError, ValueError):
            limit = int((folder / limit_name).read_text())  # "max" is no number
            if limit >= _NO_LIMIT:
                continue
            used = int((folder / used_name).read_text())
            # Pages of files count as used, and are given back when memory is asked for.
            for row in (folder / "memory.stat").read_text().splitlines():
                name, _, value = row.partition(" ")
                used -= int(value) if name == "inactive_file" else 0
            return max(limit - used, 1)
    return None


def measure_peak_bytes(device: torch.device) -> int:
    """Most memory in use since :func:`reset_peak`: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: torch.device) -> None:
    """Lets the peak begin with what is in use now, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        # See "clear_refs" in proc(5).
        Path("/proc/self/clear_refs").write_text("5")
