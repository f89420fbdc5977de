"""What this process runs on: device, its peak speed, and the versions of what it uses."""

import importlib.metadata
import os
import platform
import re

import torch

_GIB = 1024**3

# Dense bf16 FLOP/s of one device, by a pattern in torch's name of it. NVIDIA's data sheets state
# the H and B generations' figures "with sparsity"; half of that is meant here. First match wins.
_PEAK_BF16_FLOPS = (
    (r"\bA100\b", 312e12),  # A100 data sheet (2021): 312, all variants
    (r"\bH100 NVL\b", 835e12),  # H100 data sheet: 1,671 with sparsity
    (r"\bH100 PCIe\b", 756e12),  # H100 data sheet, first edition: 1,513 with sparsity
    (r"\bH100\b", 989e12),  # SXM, named "H100 80GB HBM3"; H100 data sheet: 1,979 with sparsity
    (r"\bH200 NVL\b", 835e12),  # H200 data sheet: 1,671 with sparsity
    (r"\bH200\b", 989e12),  # H200 data sheet: 1,979 with sparsity
    (r"\bGH200\b", 989e12),  # GH200 data sheet: 1,979 with sparsity
    (r"\bGB[23]00\b", 2500e12),  # GB200 and GB300 NVL72 pages: 360 PFLOPS with sparsity for 72
    (r"\bB200\b", 2250e12),  # HGX B200 page: 36 PFLOPS with sparsity for 8
    (r"\bB300\b", 2250e12),  # HGX B300 page: 36 PFLOPS with sparsity for 8
)

# Distribution names of the optional packages that change what a run can do.
_OPTIONAL_PACKAGES = ("flash-attn-4", "torchao", "datasets", "transformers", "wandb")


def device_type() -> str:
    """What this process computes on: "cuda" where it sees a usable GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str) -> str:
    """The GPU's product name as torch has it, e.g. "NVIDIA H200", or the CPU's architecture."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"


def peak_flops(name: str) -> float | None:
    """Dense bf16 peak of one device in FLOP/s, what MFU is measured against.

    None for a device that is not in the table, CPUs above all, and for a slice of a GPU (MIG): no
    MFU is better than a made-up one.
    """
    if "MIG" in name:
        return None
    return next((f for pattern, f in _PEAK_BF16_FLOPS if re.search(pattern, name)), None)


def device_memory(device: str) -> int:
    """Bytes of memory of this process's device; of the host, where that is the device."""
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_device(device: str) -> str:
    """One line for the start of the log: name, memory, peak, and the allocator's settings."""
    if device == "cpu":
        total = device_memory(device) / _GIB
        threads = torch.get_num_threads()
        return f"{device_name(device)}, {total:.1f} GiB of host memory, {threads} thread(s) a rank"
    name = device_name(device)
    total = device_memory(device) / _GIB
    peak = peak_flops(name)
    speed = f"peak {peak / 1e12:.0f} bf16 TFLOP/s" if peak else "peak speed not known, so no MFU"
    return f"{name}, {total:.1f} GiB, {speed}, allocator settings: {allocator_settings()}"


def allocator_settings() -> str:
    """The caching allocator's settings as this process was started with them.

    Without expandable segments FSDP's gathers of many sizes leave memory reserved and unusable.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "default")


def versions() -> dict[str, str]:
    """What a bug report needs. Optional packages are looked up, not imported: "not found"."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for name in _OPTIONAL_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not found"
    return found
