"""Define the enumerations of `transformer_engine_torch`, with the numbers of its C headers."""

from __future__ import annotations

from enum import IntEnum

import torch

from fp8_numerics.formats import E4M3, E5M2, Fp8Format


class DType(IntEnum):
    kByte = 0  # noqa: N815  # Transformer Engine's names
    kInt32 = 2  # noqa: N815
    kFloat32 = 4  # noqa: N815
    kFloat16 = 5  # noqa: N815
    kBFloat16 = 6  # noqa: N815
    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815
    kFloat4E2M1 = 10  # noqa: N815


FORMATS: dict[int, Fp8Format] = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}
WIDE: dict[int, torch.dtype] = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


def _counted(name: str, members: str) -> type[IntEnum]:
    made: type[IntEnum] = IntEnum(name, members, start=0)  # type: ignore[misc]
    return made


FP8FwdTensors = _counted(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _counted(
    "FP8BwdTensors",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
)
QkvFormat = _counted(
    "NVTE_QKV_Format",
    "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD "
    "NVTE_BHSD NVTE_QKV_Format_NOT_SET",
)
QkvLayout = _counted(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD "
    "NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D "
    "NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD "
    "NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD NVTE_Paged_KV_BSHD_BSHD_BSHD "
    "NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD NVTE_Paged_KV_SBHD_SBHD_SBHD "
    "NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD "
    "NVTE_QKV_Layout_NOT_SET",
)
BiasType = _counted(
    "NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI"
)
MaskType = _counted(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
SoftmaxType = _counted(
    "NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX"
)
CommOverlapType = _counted("CommOverlapType", "RS AG")
ScaleFormat = _counted("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
# Formats of a router's map, and ways to balance experts: later versions read the members when
# `router` is imported. The kernels that take them are not here.
RoutingMapFormat = _counted("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
HistogramMode = _counted("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")
ScalingMode: type[IntEnum] = IntEnum(  # type: ignore[misc]
    "NVTEScalingMode",
    {
        "NVTE_DELAYED_TENSOR_SCALING": 0,
        "NVTE_MXFP8_1D_SCALING": 1,
        "NVTE_BLOCK_SCALING_1D": 2,
        "NVTE_BLOCK_SCALING_2D": 3,
        "NVTE_NVFP4_1D_SCALING": 4,
        "NVTE_INVALID_SCALING": 100,
    },
)


def fused_attention_backends(version: tuple[int, ...]) -> type[IntEnum]:
    """Return the backends of fused attention, none of which runs here.

    Later versions check that the members are exactly theirs.
    """
    members = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    if version < (2, 16):
        members["NVTE_F16_max512_seqlen"] = 0
    made: type[IntEnum] = IntEnum("NVTE_Fused_Attn_Backend", members)  # type: ignore[misc]
    return made


def enumerations(version: tuple[int, ...]) -> dict[str, object]:
    """Return all enumerations by the names that the extension gives them."""
    made = (
        DType,
        FP8FwdTensors,
        FP8BwdTensors,
        QkvFormat,
        QkvLayout,
        BiasType,
        MaskType,
        SoftmaxType,
        CommOverlapType,
        ScaleFormat,
        ScalingMode,
        RoutingMapFormat,
        HistogramMode,
        fused_attention_backends(version),
    )
    return {cls.__name__: cls for cls in made}
