"""Makes runs bit-equal for all batch shapes.

Matrix products and activations round otherwise in batches of other shapes, by 1e-7 of a number; a
code that lies between two whole numbers then is the other one, and logits are apart by 1e-2. Here
they are computed in float64 and rounded once, which differs in one number of 1e8. So is the
rotation of keys that are stored before RoPE. Keys recomputed from stored activations keep the
model's own rotation: so they equal those that its layers computed.
"""

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh
from transformers.models.llama4 import modeling_llama4

from quire.eviction import calibration
from quire.kernels import gathered, pre_rope, select
from quire.kernels.latent import LatentHeads
from quire.models.observing import LayerKV
from quire.models.rotary import Rotary


def use_exact_products(patch: pytest.MonkeyPatch) -> None:
    """Compute in float64: linear layers, activations, and portable attention, also to codes."""

    patch.setattr(nn.functional, "linear", _in_float64(nn.functional.linear))  # experts too
    patch.setattr(torch, "bmm", _in_float64(torch.bmm))  # of all experts of Llama 4
    polar = torch.polar
    patch.setattr(torch, "polar", lambda *x: polar(*(y.double() for y in x)).to(torch.complex64))
    patch.setattr(modeling_llama4, "apply_rotary_emb", _rotated_complex)
    for name in ("silu", "gelu"):
        patch.setattr(nn.functional, name, _in_float64(getattr(nn.functional, name)))
    for kind in (GELUTanh, GELUActivation):  # models made before hold the function itself
        patch.setattr(kind, "forward", lambda module, x: module.act(x.double()).to(x.dtype))
    for module in (gathered, pre_rope, calibration):
        patch.setattr(module, "attend_dense", _in_float64(module.attend_dense))
    for module in (gathered, pre_rope):
        sums = _in_float64(module.column_sums_dense)
        patch.setattr(module, "column_sums_dense", lambda *x, sums=sums, **y: sums(*x, **y).float())
    rotate, recompute = Rotary.rotate_pre_rope, LayerKV.keys_and_values
    patch.setattr(Rotary, "rotate_pre_rope", exact_rotation(rotate))

    def keys_and_values(*args):
        with pytest.MonkeyPatch.context() as own:
            own.setattr(Rotary, "rotate_pre_rope", rotate)
            return recompute(*args)

    patch.setattr(LayerKV, "keys_and_values", keys_and_values)
    for name, wide in _wide_latents().items():
        patch.setattr(LatentHeads, name, wide)
    patch.setattr(pre_rope.PreRopeAttention, "attend", _attend_wide(pre_rope.PreRopeAttention))
    patch.setattr(select, "why_not", lambda spec, _: None if spec.is_plain else "in float64")


def _wide_latents():
    """Projections of latents in float64: attention to latents and to heads gives equal numbers."""
    plain = {name: getattr(LatentHeads, name) for name in ("fold", "unfold", "expand")}

    def by_head(name, latent, vectors):  # [token, head, dim] times the matrix of each head
        heads, dim = vectors.shape[1:]
        matrix = plain[name](latent, torch.eye(dim)[:, None].repeat(1, heads, 1))
        return torch.einsum("thd,dho->tho", vectors.double(), matrix.double())

    def expand(latent, key, value):
        rank, batch = value.shape[-1], (1,) * (value.dim() - 2)
        ones, zeros = torch.eye(rank).view(*batch, rank, rank), key.new_zeros(*batch, rank, 1)
        keys, values = plain["expand"](latent, zeros.repeat_interleave(key.shape[-1], -1), ones)
        keys, values = (value.double() @ matrix.double() for matrix in (keys, values))
        keys[..., -key.shape[-1] :] = key
        return keys, values

    return {
        "fold": lambda latent, query: by_head("fold", latent, query),
        "unfold": lambda latent, out: by_head("unfold", latent, out).float(),
        "expand": expand,
    }


def _rotated_complex(query, key, frequencies):
    """The rotation of Llama 4: neighbours are a complex number."""

    def rotated(x):
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * frequencies[:, :, None]).flatten(-2).to(x.dtype)

    return rotated(query), rotated(key)


def exact_rotation(rotate):
    """Rotations in float64, by multiples of the angles with which `rotate` rotates to position 1.

    A rotation of more than half a turn by the first position is not supported.
    """

    def wide(rotary, x, positions):
        head_dim = x.shape[-1]
        ones = positions.new_ones(head_dim)
        matrix = rotate(rotary, torch.eye(head_dim)[:, None], ones)[:, 0].double()
        cosine = matrix.diagonal()
        partner = matrix - cosine.diag()  # one number in a row and a column, the sine
        angles = torch.atan2(partner.abs().sum(dim=0), cosine) * positions[:, None, None]
        x = x.double()
        return x * angles.cos() + (x @ partner.sign()) * angles.sin()

    return wide


def _attend_wide(backend):
    attend = backend.attend

    def wide(self, plan, pages, math, query, fresh, **options):
        return attend(self, plan, pages, math, query.double(), fresh, **options).to(query.dtype)

    return wide


def _in_float64(function):
    def wide(x, *others, **options):
        doubles = (other.double() if isinstance(other, Tensor) else other for other in others)
        return function(x.double(), *doubles, **options).to(x.dtype)

    return wide
