"""Work on lists of tensors at once: norms, scaled copies, scales, and the updates of optimizers.

`chunk_size` divides the work of a GPU. `noop_flag` becomes 1 where a number is not finite, and is
read by those updates alone that a CUDA graph repeats, and by SGD. Arithmetic is in FP32 inside.
"""

from __future__ import annotations

import torch

from fp8_numerics import cast
from fp8_numerics.formats import E4M3, E5M2
from fp8_numerics.mxfp8 import LARGEST_CODE
from fp8_numerics.scales import scale_of_amax
from te_cpu.enums import FORMATS

Lists = list[list[torch.Tensor]]
NAN_CODE = 255


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all numbers of the list [1], and of each tensor where asked for."""
    return _norms(noop_flag, [x.detach().float() for x in tensor_lists[0]], per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of the numbers times `inv_scale`; the tensors stay as they are."""
    scaled = [x.detach().float() * inv_scale.float() for x in tensor_lists[0]]
    return _norms(noop_flag, scaled, per_tensor)


def _norms(
    noop_flag: torch.Tensor, tensors: list[torch.Tensor], per_tensor: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    squares = torch.stack([x.square().sum() for x in tensors])
    if not torch.isfinite(squares).all():
        noop_flag.fill_(1)
    each = squares.sqrt() if per_tensor else squares.new_empty(0)
    return squares.sum().sqrt().reshape(1), each


def multi_tensor_scale(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: float
) -> None:
    """Write each tensor of the first list, times `scale`, into that of the second list."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)
        if not torch.isfinite(source).all():
            is_infinite.fill_(1)


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """Do what `multi_tensor_scale` does with a scale that a GPU holds."""
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, scale.item())


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    is_infinite: torch.Tensor,
    tensor_lists: Lists,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Write the scale of each amax of the first list into the second, 1 / scale into the third.

    The scale is 1 for an amax that is 0 or not finite.
    """
    fmt = next(fmt for fmt in (E4M3, E5M2) if fmt.max == max_fp8)
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        floored = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
        scale.copy_(scale_of_amax(floored, fmt, power_2=force_pow_2_scales))
        scale_inv.copy_(scale.reciprocal())


def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: None, tensor_lists: Lists
) -> None:
    """Write the code of the least power of 2 that is no less than amax / 448, in E8M0.

    The amaxes are in BF16. An infinite one has the largest code, 254; NaN has 255.
    """
    for amax, code in zip(*tensor_lists, strict=True):
        least = amax.float() * torch.full((), E4M3.max).reciprocal_()
        mantissa, exponent = least.frexp()
        found = (exponent - (mantissa == 0.5).int() + 127).clamp(0, LARGEST_CODE)
        found = found.masked_fill(least == 0, 0).masked_fill(least.isinf(), LARGEST_CODE)
        code.copy_(found.masked_fill(least.isnan(), NAN_CODE))


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update lists of parameters, moments and, for parameters of less than FP32, masters.

    `tensor_lists` are gradients, parameters, first moments, second moments and masters. `mode` 0
    adds the weight decay to the gradient, 1 to the update.
    """
    first_part = 1 - beta1**step if bias_correction else 1.0
    second_part = 1 - beta2**step if bias_correction else 1.0
    for grad, param, first, second, *master in zip(*tensor_lists, strict=True):
        weight = master[0] if master else param
        old = weight.float()
        g = grad.float() + (weight_decay * old if mode == 0 else 0.0)
        m = beta1 * first.float() + (1 - beta1) * g
        v = beta2 * second.float() + (1 - beta2) * g * g
        update = (m / first_part) / ((v / second_part).sqrt() + epsilon)
        new = old - lr * (update + (weight_decay * old if mode == 1 else 0.0))
        first.copy_(m), second.copy_(v), weight.copy_(new)
        if master:
            param.copy_(new)


def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: int,
) -> None:
    """Update masters, and cast them by their scales into parameters that are bytes of FP8.

    Behind the lists of `multi_tensor_adam` come scales, amaxes, which grow, and 1 / scale.
    """
    settings = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    grads, params, first, second, masters, scales, amaxes, inverses = tensor_lists
    lists = [grads, masters, first, second]
    multi_tensor_adam(chunk_size, noop_flag, lists, *settings)
    rest = zip(params, masters, scales, amaxes, inverses, strict=True)
    for param, master, scale, amax, inverse in rest:
        payload = cast.quantize_scaled(master * scale, FORMATS[fp8_dtype])
        param.copy_(payload.view(torch.uint8))
        amax.copy_(torch.maximum(amax, cast.amax_of(master)))
        inverse.copy_(scale.reciprocal())


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Update as `multi_tensor_adam` does, with gradients that `inv_scale` unscales in their place.

    Nothing happens where `noop_flag` is 1.
    """
    if noop_flag.item() == 1:
        return
    for grad in tensor_lists[0]:
        grad.copy_(grad.float() * inv_scale)
    now = int(step.item())
    settings = (beta1, beta2, epsilon, now, mode, bias_correction, weight_decay)
    multi_tensor_adam(chunk_size, noop_flag, tensor_lists, lr.item(), *settings)


def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update masters whose upper 16 bits are parameters in BF16, and the lower ones int16.

    A parameter is the master rounded: it is one unit more where the lower bits are negative.
    """
    settings = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    grads, params, first, second, remainders = tensor_lists
    for grad, param, m, v, low in zip(grads, params, first, second, remainders, strict=True):
        high = param.view(torch.int16).int() - (low < 0).int()
        master = ((high << 16) | (low.int() & 0xFFFF)).view(torch.float32)
        multi_tensor_adam(chunk_size, noop_flag, [[grad], [master], [m], [v]], *settings)
        bits = master.view(torch.int32)
        low.copy_(bits.to(torch.int16))
        param.view(torch.int16).copy_(((bits >> 16) + (low < 0).int()).to(torch.int16))


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Update weights and their momentum; gradients are multiplied by `scale`.

    `tensor_lists` are gradients, weights, momenta and maybe copies of the weights in FP16. In the
    first run the momentum is the gradient. Nothing happens where `noop_flag` is not 0.
    """
    if noop_flag.item():
        return
    for grad, weight, moment, *copy in zip(*tensor_lists, strict=True):
        g, old = grad.float() * scale, weight.float()
        if not wd_after_momentum:
            g = g + wd * old
        if momentum:
            m = g if first_run else moment.float() * momentum + (1 - dampening) * g
            moment.copy_(m)
            g = g + momentum * m if nesterov else m
        if wd_after_momentum:
            g = g + wd * old
        weight.add_((-lr * g).to(weight.dtype))  # what is added is rounded too
        if copy:
            copy[0].copy_(weight)


KERNELS = (
    multi_tensor_l2norm,
    multi_tensor_unscale_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_compute_scale_and_scale_inv,
    multi_tensor_compute_scale_inv_e8m0,
    multi_tensor_adam,
    multi_tensor_adam_fp8,
    multi_tensor_adam_capturable,
    multi_tensor_adam_param_remainder,
    multi_tensor_sgd,
)
