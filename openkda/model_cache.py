"""What a model of KDA and full-attention layers carries from call to call, inside transformers' `DynamicCache`.

A KDA layer's entry holds its `KDACache`, of one size however long the text; a full-attention layer's keys and values grow in place.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from openkda.layer import KDACache


def extended(held: Tensor, new: Tensor) -> Tensor:
    """held [B, heads, n, D] followed by new [B, heads, t, D]: a view of held's own storage where that has room behind its last
    token, else of new storage with a quarter more room than it needs, so that a decoding step copies its own token alone."""
    B, heads, t, D = new.shape
    n = held.shape[2] if held.dim() == 4 else 0
    row = held.stride(1) if n else 0  # elements from one head's tokens to the next's, n D where there is no room
    room = n and held.stride() == (heads * row, row, D, 1) and row >= (n + t) * D and held.storage_offset() % row == 0
    if room and (held.storage_offset() + B * heads * row) * held.element_size() <= held.untyped_storage().nbytes():
        whole = held.as_strided((B, heads, n + t, D), held.stride(), held.storage_offset())
    else:
        whole = new.new_empty(B, heads, n + t + max((n + t) // 4, 64), D)[:, :, : n + t]
        if n:
            whole[:, :, :n] = held
    whole[:, :, n:] = new
    return whole


class GrowingLayer(DynamicLayer):
    """transformers' layer of keys and values, written in place. Calls with gradients or in a compiled graph concatenate as it does."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = extended(self.keys, key_states), extended(self.values, value_states)
        return self.keys, self.values


class KDAModelCache(DynamicCache):
    """transformers' cache (keys and values of full-attention layers, states of KDA layers) that also counts its tokens and appends to
    keys and values in place.

    A plain `DynamicCache(config=config)` serves too, except that a model of KDA layers alone then cannot tell
    `generate` how many tokens it holds.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
        self.tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    @property
    def is_compileable(self) -> bool:
        # Keys and values grow, and `generate` would hand a compileable cache's model ready-made 4D masks.
        return False

    def reset(self) -> None:
        super().reset()
        self.tokens = 0


def read_layer_cache(cache: DynamicCache, layer_idx: int) -> KDACache:
    """The state of KDA layer `layer_idx` inside a transformers cache."""
    layer = cache.layers[layer_idx]
    if not layer.has_previous_state[0]:
        return KDACache()
    return KDACache(layer.conv_states[0], layer.recurrent_states[0])


def write_layer_cache(cache: DynamicCache, layer_idx: int, state: KDACache) -> None:
    """Copy `state` into a transformers cache, in place so that its addresses stay (CUDA graphs, offloading)."""
    layer = cache.layers[layer_idx]
    if not layer.is_conv_states_initialized[0]:
        layer.lazy_initialization(conv_states=state.conv_state, recurrent_states=state.recurrent_state)
    for kept, new in ((layer.conv_states[0], state.conv_state), (layer.recurrent_states[0], state.recurrent_state)):
        if kept is not new:  # a decoding step has written into the cache's own tensors already
            kept.copy_(new)
    layer.has_previous_state[0] = True
