"""Choose the peak that a run's FLOPs utilization is a fraction of."""

from __future__ import annotations

import torch

from megafp8.hardware.peak import measured_tflops
from megafp8.observe.units import plural
from megafp8.parallel.agreement import from_main
from megafp8.parallel.mesh import Mesh
from megafp8.plan.utilization import Peak, peak_of_gpu
from megafp8.precision.formats import DTYPE_NAMES, DTYPES
from megafp8.precision.gemm import wide_dtype
from megafp8.specs import RunSpec


def peak_of_ranks(spec: RunSpec, mesh: Mesh) -> Peak:
    """Return the peak of one rank, as the main rank finds it. All ranks call it together.

    The main rank measures alone, while the others wait.
    """
    peak: Peak = from_main(mesh, peak_of(spec, mesh.device) if mesh.is_main else None)
    return peak


def peak_of(spec: RunSpec, device: torch.device) -> Peak:
    """Return the peak of one rank: a data sheet's, or a rate that is measured now.

    On a CPU the product has the dtype in which the run's products run there, which for FP8 is a
    wider one. On a GPU that is not known it is BF16.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = peak_of_gpu(name)
        if known is not None:
            return known
        where, dtype = name, torch.bfloat16
        how = "measured now"
    else:
        where = "CPU"
        dtype = wide_dtype(device, DTYPES[spec.precision.compute])
        how = f"measured now with {plural(torch.get_num_threads(), 'thread')}"
    return Peak(
        device=where,
        tflops=measured_tflops(device, dtype),
        products=DTYPE_NAMES[dtype].upper(),
        fp8_tflops=None,
        source=how,
    )
