"""A language model of KDA and full-attention layers, as a Hugging Face `PreTrainedModel`. model_cache.py has what `generate` carries along.

Pre-norm blocks: x += mixer(rms_norm(x)); x += mlp(rms_norm(x)), the mixer of layer i chosen by `layer_types[i]`:
"linear_attention" is `openkda.layer.KimiDeltaAttention`, "full_attention" is grouped-query softmax attention, without
positional encoding by default (as in Kimi Linear, where KDA carries position) or with rotary embeddings.

Works with transformers 5.17 and newer; 5.24 renamed `past_key_values` to `cache`, so both names are read and the output
object gets the name that the installed version knows.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from openkda.layer import GatedRMSNorm, KimiDeltaAttention, Packing
from openkda.model_cache import KDAModelCache, read_layer_cache, write_layer_cache
from openkda.problem import check_bounds, check_number

# With cuDNN's attention a decoded token took 45 ms on an H200: it seems to plan anew for every number of keys.
EAGER_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class KDAConfig(PreTrainedConfig):
    """Sizes and options of a KDA language model.

    Args:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers: as usual.
        layer_types: "linear_attention" (KDA) or "full_attention" for each layer; default three KDA layers, then one full.
        num_heads, head_dim, num_v_heads, head_v_dim, conv_size, lower_bound, allow_neg_eigval, output_gate_bias: of the
            KDA layers, see `KimiDeltaAttention`.
        num_attention_heads, num_key_value_heads, attention_head_dim: of the full-attention layers.
        rope_theta: base of the rotary embeddings of the full-attention layers; None (the default) for none.
        rms_norm_eps, initializer_range, tie_word_embeddings, use_cache: as usual.
        kda_backend: name of the kernel backend, None for the best that serves.

    Raises:
        ValueError: a size below 1, `layer_types` of the wrong length or with an unknown entry, heads that key-value heads do not divide,
            rotary embeddings of an odd dim or to a base that is not positive. What a KDA layer refuses, it refuses when it is made.
    """

    model_type = "openkda"
    keys_to_ignore_at_inference = ("cache", "past_key_values")

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 2048,
        intermediate_size: int = 5632,
        num_hidden_layers: int = 24,
        layer_types: list[str] | None = None,
        num_heads: int = 16,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        output_gate_bias: bool = False,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        attention_head_dim: int = 128,
        rope_theta: float | None = None,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        kda_backend: str | None = None,
        **kwargs,  # the base class's own fields, which from_pretrained hands over
    ):
        sizes = dict(
            vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads, attention_head_dim=attention_head_dim,
            num_key_value_heads=num_attention_heads if num_key_value_heads is None else num_key_value_heads,
        )  # fmt: skip
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be an int of at least 1")
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers = num_hidden_layers
        if layer_types is None:
            layer_types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_hidden_layers)]
        if len(layer_types) != num_hidden_layers or set(layer_types) - {"linear_attention", "full_attention"}:
            raise ValueError(
                f"layer_types must name linear_attention or full_attention for each of num_hidden_layers={num_hidden_layers} layers, "
                f"got {layer_types}"
            )
        if num_attention_heads % sizes["num_key_value_heads"]:
            raise ValueError(f"num_attention_heads={num_attention_heads} must be a multiple of num_key_value_heads={num_key_value_heads}")
        check_number("rope_theta", rope_theta)
        if rope_theta is not None and (not 0 < rope_theta < float("inf") or attention_head_dim % 2):
            raise ValueError(f"rope_theta={rope_theta} must be positive, and attention_head_dim={attention_head_dim} even with it")
        self.layer_types = list(layer_types)
        self.num_heads, self.head_dim, self.num_v_heads, self.head_v_dim = num_heads, head_dim, num_v_heads, head_v_dim
        self.conv_size, self.lower_bound, self.allow_neg_eigval = conv_size, lower_bound, allow_neg_eigval
        self.output_gate_bias = output_gate_bias
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = sizes["num_key_value_heads"]
        self.attention_head_dim, self.rope_theta = attention_head_dim, rope_theta
        self.rms_norm_eps, self.initializer_range, self.use_cache = rms_norm_eps, initializer_range, use_cache
        self.kda_backend = kda_backend
        super().__init__(**kwargs)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in x's dtype."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)  # one dtype: torch's fused kernel serves no mixture
        return F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, config: KDAConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [B, H, T, D] at positions [B, T], pairing channel i with i + D/2; fp32 angles."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * frequency  # [B, 1, T, D/2]
    a, b = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class FullAttention(nn.Module):
    """Grouped-query softmax attention through torch's scaled_dot_product_attention."""

    def __init__(self, config: KDAConfig, layer_idx: int):
        super().__init__()
        self.layer_idx, self.rope_theta = layer_idx, config.rope_theta
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.attention_head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, *, positions: Tensor, mask: Tensor | None, cache: DynamicCache | None) -> Tensor:
        heads = lambda y: y.unflatten(-1, (-1, self.dim)).transpose(1, 2)  # [B, heads, T, dim]
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        if self.rope_theta is not None:
            q, k = rotate(q, positions, self.rope_theta), rotate(k, positions, self.rope_theta)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        causal = mask is None and (True if q.shape[2] > 1 else False)  # noqa: SIM210 (a plain bool also when T is symbolic)
        growing = cache is not None and not torch.compiler.is_compiling()
        with sdpa_kernel(EAGER_KERNELS) if growing else nullcontext():
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(o.transpose(1, 2).flatten(-2))


class Block(GradientCheckpointingLayer):
    """One pre-norm block; the mixer is KDA or full attention."""

    def __init__(self, config: KDAConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.is_kda = config.layer_types[layer_idx] == "linear_attention"
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.is_kda:
            self.self_attn = KimiDeltaAttention(
                config.hidden_size, config.num_heads, config.head_dim, num_v_heads=config.num_v_heads,
                head_v_dim=config.head_v_dim, conv_size=config.conv_size, lower_bound=config.lower_bound,
                allow_neg_eigval=config.allow_neg_eigval, output_gate_bias=config.output_gate_bias,
                norm_eps=config.rms_norm_eps, backend=config.kda_backend,
            )  # fmt: skip
        else:
            self.self_attn = FullAttention(config, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, *, positions: Tensor, full_mask: Tensor | None, packing: Packing | None, cu_seqlens: Tensor | None,
        cache: DynamicCache | None = None,
    ) -> Tensor:  # fmt: skip
        h = self.input_layernorm(x)
        if self.is_kda:
            state = None if cache is None else read_layer_cache(cache, self.layer_idx)
            h = self.self_attn(h, attention_mask=packing, cu_seqlens=cu_seqlens, cache=state)
            if cache is not None:
                write_layer_cache(cache, self.layer_idx, state)
        else:
            h = self.self_attn(h, positions=positions, mask=full_mask, cache=cache)
        x = x + h
        return x + self.mlp(self.post_attention_layernorm(x))


def full_attention_mask(
    batch: int, tokens: int, past: int, token_mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device
) -> Tensor | None:
    """Mask [B, 1, T, past+T] of the full-attention layers; None where the plain causal mask does, its form for a call that goes on
    from a cache where that does."""
    if token_mask is None and cu_seqlens is None:
        if past == 0 or tokens == 1:
            return None
        if not torch.compiler.is_compiling():  # it breaks the graph
            return causal_lower_right(tokens, past + tokens)
    row = past + torch.arange(tokens, device=device)
    column = torch.arange(past + tokens, device=device)
    mask = (column <= row[:, None]).expand(batch, 1, -1, -1)
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens[1:].long(), column, right=True)
        mask = mask & (document == document[:, None])
    if token_mask is not None:
        # A padding row keeps its own column: a softmax over nothing is NaN, and NaN would reach real gradients.
        mask = mask & (token_mask[:, None, None, : past + tokens].bool() | (column == row[:, None]))
    return mask


class KDAPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of every model here: configuration, initialisation, what stays fp32."""

    config_class = KDAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Block",)
    _supports_sdpa = True
    _is_stateful = True  # a recurrent state cannot be cropped: no assisted decoding
    # The decay parameters stay fp32 whatever dtype the model is loaded in: their rounding would be systematic per channel.
    _keep_in_fp32_modules_strict = ("A_log", "dt_bias")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # `init` leaves parameters alone that came from a checkpoint, so loading never redraws A_log.
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RMSNorm | GatedRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, nn.Conv1d):
            init.kaiming_uniform_(module.weight, a=5**0.5)
        elif isinstance(module, KimiDeltaAttention):
            A_log, dt_bias = module.initial_decay()
            init.copy_(module.A_log, A_log)
            init.copy_(module.dt_bias, dt_bias)


class KDAModel(KDAPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: KDAConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: DynamicCache | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple:
        """Run the stack.

        Args:
            input_ids: [B, T] int64, or `inputs_embeds` [B, T, hidden_size]: exactly one.
            attention_mask: [B, past + T], nonzero for tokens that count; left, right or any padding.
            position_ids: [B, T] for the rotary embeddings; default: counted over valid tokens.
            cache (or `past_key_values`): a transformers `DynamicCache` made for this config; read and updated in place.
            use_cache: make a cache when none is given; default the config's in eval mode, off in training.
            cu_seqlens: [N+1] bounds of documents packed in one row (B = 1, no cache, no mask).
            return_dict: False for a plain tuple of the outputs.

        Raises:
            ValueError: both or neither of input_ids and inputs_embeds; cu_seqlens with a mask or cache; a mask or bounds that do not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        B, T, _ = x.shape
        cache = past_key_values if cache is None else cache
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if cu_seqlens is not None:
            if attention_mask is not None or cache is not None:
                raise ValueError("cu_seqlens (packed documents) excludes attention_mask and a cache")
            if B != 1:
                raise ValueError(f"input_ids must have B=1 with cu_seqlens, got B={B}")
            check_bounds(cu_seqlens, None, T, wait=True)
            use_cache = False
        if use_cache and cache is None:
            cache = KDAModelCache(self.config)
        has_full = "full_attention" in self.config.layer_types  # KDA layers need no positions
        past = cache.get_seq_length() if cache is not None and has_full else 0
        if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < past + T):
            raise ValueError(f"attention_mask must be [B={B}, past + T={past + T}], got {list(attention_mask.shape)}")

        # One look at the mask a step spares every layer the packed path; a compiled graph cannot look and packs.
        full = lambda mask: mask is None or (not torch.compiler.is_compiling() and bool(mask.all()))
        packing = None if attention_mask is None or full(attention_mask[:, -T:]) else Packing.of(attention_mask[:, -T:])
        token_mask = None if full(attention_mask) else attention_mask
        if position_ids is None:
            position_ids = default_positions(B, T, past, token_mask, cu_seqlens, x.device)
        full_mask = None
        if has_full:
            full_mask = full_attention_mask(B, T, past, token_mask, cu_seqlens, x.device)

        hidden_states = [x] if output_hidden_states else None
        for block in self.layers:
            x = block(x, positions=position_ids, full_mask=full_mask, packing=packing, cu_seqlens=cu_seqlens, cache=cache)
            if output_hidden_states:
                hidden_states.append(x)
        if isinstance(cache, KDAModelCache):
            cache.tokens += T
        output = {CACHE_NAME: cache if use_cache else None}
        output = BaseModelOutputWithPast(
            last_hidden_state=self.norm(x), hidden_states=tuple(hidden_states) if output_hidden_states else None, **output
        )
        return output.to_tuple() if return_dict is False else output


def default_positions(
    batch: int, tokens: int, past: int, token_mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device
) -> Tensor:
    """Position of each token inside its own sequence, [B, T] int64: padding and other documents do not count."""
    if token_mask is not None:
        return (token_mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens:]
    position = past + torch.arange(tokens, device=device)
    if cu_seqlens is not None:
        bounds = cu_seqlens.long()
        document = torch.searchsorted(bounds[1:], position, right=True)
        position = position - bounds[document]
    return position.expand(batch, -1)


class KDAForCausalLM(KDAPreTrainedModel, GenerationMixin):
    """`KDAModel` with a vocabulary head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' protocol)

    def __init__(self, config: KDAConfig):
        super().__init__(config)
        self.model = KDAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length):
        """What `generate` calls for its cache: ours, unless the user brought one or asked for a special kind."""
        brought = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        if brought is None and generation_config.use_cache and generation_config.cache_implementation is None:
            model_kwargs[CACHE_NAME] = KDAModelCache(self.config)
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: DynamicCache | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """As `KDAModel.forward`, and:

        Args:
            labels: [B, T] int64, shifted inside: the loss is the mean cross entropy (nats) of token t+1 given up to t;
                -100 is ignored.
            logits_to_keep: compute logits for the last so many tokens (0: all), or for these indices.
        """
        output = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, cache, cu_seqlens, output_hidden_states
        )
        x = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=output.hidden_states, **{CACHE_NAME: getattr(output, CACHE_NAME)}
        )
        return result.to_tuple() if return_dict is False else result


# After `import openkda.model`, transformers' Auto classes load these checkpoints.
AutoConfig.register("openkda", KDAConfig, exist_ok=True)
AutoModelForCausalLM.register(KDAConfig, KDAForCausalLM, exist_ok=True)
