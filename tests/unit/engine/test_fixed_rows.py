from unittest.mock import Mock

import torch

from quire.config.sampling_params import SamplingParams
from quire.engine.runner import PaddedBridge, in_parts, padded
from quire.models.base import AttentionCall
from support.requests import make_request

CALL = AttentionCall(layer=0, scale=1.0, window=None, softcap=None, sinks=None)


def split(tokens, size):
    params = SamplingParams(max_tokens=1)
    requests = [(make_request(str(i), [1] * n, params), n) for i, n in enumerate(tokens)]
    return [
        [(int(p.request.request_id), p.done, p.tokens, p.later) for p in batch]
        for batch in in_parts(requests, size)
    ]


def test_parts_have_every_token_once_and_padding_no_attention():
    assert split([7, 1, 3], 4) == [[(0, 0, 4, 3)], [(0, 4, 3, 0), (1, 0, 1, 0)], [(2, 0, 3, 0)]]
    assert split([4, 4], 4) == [[(0, 0, 4, 0)], [(1, 0, 4, 0)]]  # no empty batch after a full one
    assert split([1, 1], 4) == [[(0, 0, 1, 0), (1, 0, 1, 0)]]

    tokens = [13, 1, 1, 40, 2, 8]
    parts = [part for batch in split(tokens, 8) for part in batch]

    for number, count in enumerate(tokens):
        own = [part[1:] for part in parts if part[0] == number]
        assert sum(size for _, size, _ in own) == count
        assert own[0][0] == 0
        assert all(done + size + later == count for done, size, later in own)

    assert [padded([3, 4], size) for size in (4, 2)] == [[3, 4, 0, 0], [3, 4]]
    attend = Mock(side_effect=lambda call, query, key, value: query + 1)
    bridge, rows = Mock(attend=attend), torch.ones(5, 2, 4)

    out = PaddedBridge(bridge, 3).attend(CALL, rows, rows, rows)

    assert [len(states) for states in attend.call_args.args[1:]] == [3, 3, 3]
    assert out.tolist() == torch.cat([torch.full((3, 2, 4), 2.0), torch.zeros(2, 2, 4)]).tolist()
    assert torch.equal(PaddedBridge(bridge, 5).attend(CALL, rows, rows, rows), rows + 1)
