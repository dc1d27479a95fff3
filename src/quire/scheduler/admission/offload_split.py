"""Bytes of a request with offloaded pages: staging and pages in KV memory, offload memory."""

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.scheduler.admission.lane_peaks import UNBOUNDED
from quire.scheduler.admission.need import Need

if TYPE_CHECKING:
    from quire.scheduler.admission.peaks import Peaks


@dataclass(frozen=True, slots=True)
class OffloadSplit:
    """Bytes of one sequence at its peak, with the smallest steps.

    Attributes:
        staging_bytes: KV memory for one layer of the offloaded pages.
        rest_bytes: KV memory for pages that are not offloaded.
        offloaded_bytes: offload memory.
        offloaded_tokens: tokens of the offloaded pages.
    """

    staging_bytes: int
    rest_bytes: int
    offloaded_bytes: int
    offloaded_tokens: int


def offload_text(peaks: "Peaks", need: Need) -> str:
    """Describe the memory that a request with KV offload needs, for an error message.

    Args:
        peaks: page arithmetic of the KV memory.
        need: need of the request's single sequence.

    Returns:
        A clause that ends in "; "; empty if no page is offloaded.
    """
    if not peaks.offloads(need):
        return ""
    split, unlimited = peaks.offload_split(need), copy(peaks)
    unlimited.offloaded_tokens = UNBOUNDED
    is_full = split.offloaded_bytes < unlimited.offload_split(need).offloaded_bytes
    rest = "tokens that do not fit in the offload memory" if is_full else "the last chunk"
    return (
        f"with KV offload the KV memory must hold {split.staging_bytes:,} B of staging (one layer "
        f"of {split.offloaded_tokens:,} offloaded tokens) and {split.rest_bytes:,} B of pages that "
        f"are not offloaded ({rest}), and the offload memory {split.offloaded_bytes:,} B of its "
        f"{peaks.offload_bytes:,} B; "
    )
