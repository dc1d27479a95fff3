"""Copies of whole pages are torch's, or Triton's if they are right on the device."""

import logging

import pytest
import torch

from quire.kernels import page_copies
from quire.kernels.page_copies import IN_TORCH, PageCopies, checked
from support.interpreted import CPU, FAILURES, interpreted

launch = interpreted("launch")

IN_TRITON = PageCopies(launch.pack_pages, launch.unpack_pages)


def test_a_cpu_copies_in_torch():
    assert page_copies.page_copies(CPU) is IN_TORCH


def test_a_gpu_copies_in_triton(monkeypatch):
    monkeypatch.setattr(page_copies, "why_no_triton", lambda device: None)
    monkeypatch.setattr(page_copies, "checked", lambda make, device: make())
    copies = page_copies.page_copies.__wrapped__(torch.device("cuda"))

    assert copies == IN_TRITON


@pytest.mark.parametrize("copies", [IN_TORCH, IN_TRITON])
def test_right_copies_are_used(copies):
    assert checked(lambda: copies, CPU) is copies


@pytest.mark.parametrize("side", ["pack", "unpack"])
def test_wrong_copies_are_not_used(side, caplog):
    copies = {"pack": IN_TORCH.pack, "unpack": IN_TORCH.unpack, side: lambda *args: None}

    assert checked(lambda: PageCopies(**copies), CPU) is IN_TORCH
    assert "wrong bytes" in caplog.text


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["import", "launch"])
def test_copies_that_cannot_be_launched_are_not_used(error, place, caplog):
    def fail(*args):
        raise error

    make = fail if place == "import" else lambda: PageCopies(fail, fail)

    assert checked(make, CPU) is IN_TORCH
    assert caplog.records[0].levelno == logging.WARNING
    assert f"Triton cannot run them: {error}" in caplog.text
