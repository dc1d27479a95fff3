"""Stored cosines and sines equal those of the rotary module."""

import pytest
import torch

from quire.models.native import decoder
from quire.models.native.decoder import RopeTable
from support import zoo


@pytest.fixture
def rotary():
    return zoo.build("wide_llama").model.rotary_emb


def assert_at(table, rotary, positions):
    for found, expected in zip(
        table.at(positions), rotary(torch.empty(1), positions[None]), strict=True
    ):
        torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-6)


def test_rows_are_those_of_the_module_while_the_table_grows(rotary, monkeypatch):
    monkeypatch.setattr(decoder, "FIRST_POSITIONS", 4)
    monkeypatch.setattr(decoder, "MAX_POSITIONS", 64)
    table = RopeTable(rotary)

    for positions in ([0], [3, 0, 3], [40, 2], [1], [63], [64, 5], [1000]):
        assert_at(table, rotary, torch.tensor(positions))


def test_each_set_of_frequencies_has_its_own_table(rotary):
    table, positions = RopeTable(rotary), torch.tensor([7, 1])
    first = rotary.inv_freq
    for frequencies in (first, first / 3, first):
        rotary.inv_freq = frequencies
        assert_at(table, rotary, positions)
