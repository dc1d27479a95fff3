"""A stand-in for the package flashinfer: the signatures of version 0.7.2, computed by PyTorch.

Arguments are checked as the kernels of FA2 do: types, devices, shapes and strides.
"""

import math
from typing import ClassVar

import torch

HND = "HND"


class _Wrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any()  # zeros at the first use
        assert (kv_layout, backend) == (HND, "fa2")
        self.num_plans, self._workspace = 0, float_workspace_buffer

    def _plan(self, indptr, indices, last_page_len, **shape):
        for numbers in (indptr, indices, last_page_len):
            assert numbers.dtype == torch.int32
            assert numbers.is_contiguous()
        assert len(indptr) == len(last_page_len) + 1
        assert int(indptr[-1]) == len(indices)
        assert int(indptr[0]) == 0
        assert (indptr[1:] > indptr[:-1]).all()
        page_size = shape["page_size"]
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert shape["num_qo_heads"] % shape["num_kv_heads"] == 0
        assert shape["q_data_type"] in (torch.float16, torch.bfloat16)
        assert shape["kv_data_type"] == shape["q_data_type"]
        assert shape["window_left"] >= -1
        self.num_plans += 1
        self._indices = indices  # `.to` of a tensor on its device returns the tensor
        self._indptr, self._last, self._shape = indptr.clone(), last_page_len.clone(), shape

    def _run(self, q, paged_kv_cache, out, qo_indptr):
        shape, (key, value) = self._shape, paged_kv_cache
        heads, kv_heads, head_dim = (
            shape[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim")
        )
        assert q.shape == (int(qo_indptr[-1]), heads, head_dim) == out.shape
        assert {q.dtype, out.dtype, key.dtype, value.dtype} == {shape["q_data_type"]}
        assert key.shape[1:] == (kv_heads, shape["page_size"], head_dim) == value.shape[1:]
        assert key.stride() == value.stride()
        assert key.stride(3) == q.stride(2) == 1
        assert out.is_contiguous()
        for row in range(len(self._last)):
            first, end = self._indptr[row], self._indptr[row + 1]
            pages = self._indices[first:end].long()
            assert (pages >= 0).all()
            slots = (len(pages) - 1) * shape["page_size"] + int(self._last[row])
            queries = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
            sides = (x[pages].transpose(0, 1).reshape(kv_heads, -1, head_dim) for x in (key, value))
            k, v = (x[:, :slots].repeat_interleave(heads // kv_heads, 0).float() for x in sides)
            out[queries] = self._attend(q[queries].float(), k, v).to(out.dtype)
        return out

    def _attend(self, q, k, v):
        shape = self._shape
        scale = shape["sm_scale"]
        if scale is None:
            scale = 1 / math.sqrt(q.shape[2])
        scores = torch.einsum("qhd,hsd->hqs", q, k) * scale
        cap = shape["logits_soft_cap"]
        if cap:
            scores = cap * torch.tanh(scores / cap)
        slot = torch.arange(k.shape[1])
        query = torch.arange(len(q))[:, None] + k.shape[1] - len(q)
        seen = slot <= query if shape["causal"] else torch.ones(len(q), len(slot)).bool()
        if shape["window_left"] >= 0:
            seen = seen & (slot >= query - shape["window_left"])
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqs,hsd->qhd", weights, v)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    made: ClassVar[list] = []

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        *,
        backend="auto",
    ):
        super().__init__(float_workspace_buffer, kv_layout, backend=backend)
        self.use_tensor_cores = use_tensor_cores
        self.made.append(self)

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        sm_scale=None,
    ):
        group = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or group in (1, 2, 3, 4, 6, 8, 16)
        self._plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            causal=False,
        )

    def run(self, q, paged_kv_cache, *, out):
        return self._run(q, paged_kv_cache, out, torch.arange(len(self._last) + 1))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    made: ClassVar[list] = []

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, *, backend="auto"
    ):
        super().__init__(float_workspace_buffer, kv_layout, backend=backend)
        self.made.append(self)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        assert qo_indptr.dtype == torch.int32
        assert len(qo_indptr) == len(paged_kv_indptr)
        self._qo_indptr = qo_indptr.clone()
        self._plan(
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            causal=causal,
        )

    def run(self, q, paged_kv_cache, *, out):
        return self._run(q, paged_kv_cache, out, self._qo_indptr)
