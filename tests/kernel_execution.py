"""Decides how the tests run Triton kernels: on a GPU, on the PTX emulator, or under Triton's interpreter."""

from __future__ import annotations

import os

import torch

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
KERNEL_ARCH = os.environ.get("VIT_FAST_EXECUTE")  # the emulator's architecture, set by execute.py
INTERPRETED = not HAS_GPU and KERNEL_ARCH is None
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported: before any kernel is decorated

# Exact fp32 products run on the CUDA cores, which takes the emulator minutes; test_executed_kernels has small ones.
DTYPES = (torch.float16, torch.bfloat16) if KERNEL_ARCH else (torch.float32, torch.float16, torch.bfloat16)
