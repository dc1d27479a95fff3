"""Steps as batches of equal size: split requests, padding, and that padding writes no KV."""

import torch

from quire.config.sampling_params import SamplingParams
from quire.engine.runner import PaddedBridge, in_parts, padded
from quire.models.base import AttentionCall
from quire.scheduler.request import Request
from support.requests import make_request

CALL = AttentionCall(layer=0, scale=1.0, window=None, softcap=None, sinks=None)


def requests(tokens: list[int]) -> list[tuple[Request, int]]:
    return [
        (
            make_request(
                request_id=str(i),
                prompt_token_ids=[1] * count,
                params=SamplingParams(max_tokens=1),
                sampling_seed=0,
            ),
            count,
        )
        for i, count in enumerate(tokens)
    ]


def split(tokens: list[int], size: int) -> list[list[tuple[int, int, int, int]]]:
    batches = in_parts(requests(tokens), size)
    return [
        [(int(p.request.request_id), p.done, p.tokens, p.later) for p in batch] for batch in batches
    ]


def test_requests_are_split_if_a_batch_is_full():
    assert split([7, 1, 3], 4) == [
        [(0, 0, 4, 3)],
        [(0, 4, 3, 0), (1, 0, 1, 0)],
        [(2, 0, 3, 0)],
    ]


def test_exactly_full_batch_is_not_followed_by_an_empty_one():
    assert split([4, 4], 4) == [[(0, 0, 4, 0)], [(1, 0, 4, 0)]]
    assert split([1, 1], 4) == [[(0, 0, 1, 0), (1, 0, 1, 0)]]


def test_every_token_is_in_one_part_with_the_count_of_later_tokens():
    tokens = [13, 1, 1, 40, 2, 8]
    parts = [part for batch in split(tokens, 8) for part in batch]

    for number, count in enumerate(tokens):
        own = [part[1:] for part in parts if part[0] == number]
        assert sum(size for _, size, _ in own) == count
        assert own[0][0] == 0
        assert all(done + size + later == count for done, size, later in own)


def test_padding_appends_zeros():
    assert padded([3, 4], 4) == [3, 4, 0, 0]
    assert padded([3, 4], 2) == [3, 4]


class RecordsRows:
    """Attention that records the number of rows of its inputs."""

    def attend(self, call, query, key, value):
        self.rows = len(query), len(key), len(value)
        return query + 1


def test_attention_does_not_receive_padding_rows():
    bridge, rows = RecordsRows(), torch.ones(5, 2, 4)

    out = PaddedBridge(bridge, 3).attend(CALL, rows, rows, rows)

    assert bridge.rows == (3, 3, 3)
    assert out.tolist() == torch.cat([torch.full((3, 2, 4), 2.0), torch.zeros(2, 2, 4)]).tolist()
    assert torch.equal(PaddedBridge(bridge, 5).attend(CALL, rows, rows, rows), rows + 1)
