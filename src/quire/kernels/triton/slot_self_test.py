"""Compares the kernels that move slots and accumulate statistics with the reference."""

import torch

from quire.kernels.backend import (
    AttentionBackend,
    AttentionMeasure,
    AttentionStatistic,
    MovedSlots,
    StatisticRows,
)
from quire.kernels.reference_backend import ReferenceAttention
from quire.layout.statistics import MEAN

SLOTS, NEW_TOKENS = (3, 300, 20), (1, 1, 5)
HEADS, GROUP, PAGE_TOKENS = 2, 2, 16
COLUMNS = -(-max(SLOTS) // PAGE_TOKENS)
NUM_PAGES = len(SLOTS) * COLUMNS


def moves_right(backend: AttentionBackend, device: torch.device) -> bool:
    """Return whether slots that exchange places are copied correctly."""
    pages = torch.arange(2 * HEADS * PAGE_TOKENS * 3).view(2, HEADS, PAGE_TOKENS, 3).int()
    ends = (torch.tensor([0, 1, 0]), torch.tensor([2, 5, 7]))
    onto = (torch.tensor([1, 0, 0]), torch.tensor([5, 7, 2]))
    expected, got = pages.clone(), pages.to(device)
    ReferenceAttention().move(MovedSlots((expected,), ends, onto))
    source, target = ([x.to(device) for x in places] for places in (ends, onto))
    backend.move(MovedSlots((got,), (source[0], source[1]), (target[0], target[1])))
    return torch.equal(got.cpu(), expected)


def tallies_right(backend: AttentionBackend, device: torch.device) -> bool:
    """Return whether attention is added to the statistics of old slots, and replaces new ones."""
    numbers = torch.linspace(0, 1, NUM_PAGES * HEADS * PAGE_TOKENS)
    shape = (NUM_PAGES, HEADS, PAGE_TOKENS, 1)
    table = torch.arange(NUM_PAGES).flip(0).int().view(len(SLOTS), 1, COLUMNS)
    rows = torch.arange(len(SLOTS))
    held, fresh = torch.tensor(SLOTS).int()[:, None], torch.tensor(NEW_TOKENS).int()
    sums = torch.linspace(1, 0, len(SLOTS) * HEADS * GROUP * max(SLOTS))
    found = []
    for own, place in ((ReferenceAttention(), torch.device("cpu")), (backend, device)):
        planes = numbers.to(place, copy=True).view(shape)
        own.tally(
            AttentionStatistic(planes, table.to(place), 0, AttentionMeasure.SUM, MEAN),
            StatisticRows(*(x.to(place) for x in (rows, rows, held, fresh))),
            sums.view(len(SLOTS), HEADS * GROUP, max(SLOTS)).to(place),
        )
        found.append(planes.cpu())
    return torch.allclose(found[0], found[1], atol=1e-5)
