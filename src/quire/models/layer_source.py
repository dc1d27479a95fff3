"""The port of weight offload: what a model and an engine know of layers that are not on the device.

    load_model --- check, place ---> LayerPlacer ---> LayerSource ---> TransformersDecoder, engine

`quire.offload.weights` implements both; a model that lies whole on its device has neither.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from quire.plan.offload.resident import WeightsPlacement


@runtime_checkable
class LayerSource(Protocol):
    """Brings weights of layers that are not on the device, by hooks on the layers."""

    @property
    def place(self) -> WeightsPlacement:
        """Where weights lie."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The decoder layers."""

    @property
    def device_s(self) -> float:
        """The device's own work in all passes so far: what they took, without waiting."""

    @property
    def copied_s(self) -> float:
        """What copies have taken."""

    @property
    def num_bytes(self) -> int:
        """Bytes transferred so far."""

    def shared_by(self, batches: int) -> AbstractContextManager[None]:
        """Within, so many forwards run layer by layer: a layer goes when all have left it."""


@runtime_checkable
class LayerPlacer(Protocol):
    """Puts a model on its device with some layers' weights outside of it."""

    def check(
        self, config: PreTrainedConfig, *, dtype: torch.dtype | None, trust_remote_code: bool
    ) -> None:
        """Refuse before a weight is read what cannot be placed, from the model's shapes alone.

        Args:
            config: of the model.
            dtype: of the weights; None: as config says.
            trust_remote_code: run the code the folder brings.

        Raises:
            ConfigError: too small a memory; names the least.
            UnsupportedModel: the layers' weights cannot be brought one by one.
        """

    def place(
        self, model: PreTrainedModel, device: torch.device
    ) -> tuple[WeightsPlacement, LayerSource | None]:
        """Put a model on its device.

        Args:
            model: on the CPU, in its final dtype; nobody has looked for its weights yet.
            device: where the model runs.

        Returns:
            Where weights lie, and what brings those that are not on the device; None where all are.

        Raises:
            ConfigError: too small a memory, or no room on the device or outside of it; nothing has
                been moved then.
            UnsupportedModel: the layers' weights cannot be brought one by one.
        """
