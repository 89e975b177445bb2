"""Nomic's BERT: rotary positions and gated MLPs in BERT's order of norms. Configs are transformers' or Nomic's own."""

from mlx_parallm.models.encoders.encoder_layers import ACTIVATION_NAMES, Embeddings, Encoder, EncoderLayer, Rotary
from mlx_parallm.models.encoders.encoder_weights import Settings, Weights

MODEL_TYPES = ("nomic_bert",)
PREFIXES = ("", "bert.", "nomic_bert.", "model.")
GATES = {"swiglu": "silu", "geglu": "gelu", "glu": None}


def build(settings: Settings, weights: Weights) -> Encoder:
    _check(settings)
    size = settings.size("hidden_size", "n_embd")
    heads = settings.size("num_attention_heads", "n_head")
    if size % heads:
        raise settings.wrong("num_attention_heads", heads, f"a divisor of the hidden size {size}")
    eps = settings.number("layer_norm_eps", "layer_norm_epsilon", default=1e-12)
    types = settings.get("type_vocab_size", default=2)
    embeddings = Embeddings(
        word=weights.take("embeddings.word_embeddings.weight", -1, size),
        norm=weights.norm("emb_ln", size, eps),
        types=weights.take("embeddings.token_type_embeddings.weight", types, size) if types else None,
    )
    depth = settings.size("num_hidden_layers", "n_layer")
    return Encoder(
        family="nomic_bert",
        embeddings=embeddings,
        layers=[_layer(settings, weights, index, size, heads, eps) for index in range(depth)],
        max_length=_max_length(settings),
    )


def _check(settings: Settings) -> None:
    for name in ("prenorm", "parallel_block", "use_rms_norm", "causal", "qkv_proj_bias_only"):
        settings.one_of(name, (False,), False)
    settings.one_of("num_experts", (0,), 0)
    settings.one_of("moe_every_n_layers", (0,), 0)
    settings.one_of("rotary_emb_scale_base", (0, 0.0), 0)


def _max_length(settings: Settings) -> int:
    """Positions for which the angles are scaled by the length are not served."""
    length = settings.size("max_position_embeddings", "n_positions", default=2048)
    if settings.get("rotary_scaling_factor"):
        return min(length, settings.size("max_trained_positions", default=2048))
    return length


def _layer(settings: Settings, weights: Weights, index: int, size: int, heads: int, eps: float) -> EncoderLayer:
    at = f"encoder.layers.{index}"
    inner = settings.size("intermediate_size", "n_inner", default=4 * size)
    return EncoderLayer(
        qkv=weights.dense(f"{at}.attn.Wqkv", 3 * size, size, None),
        out=weights.dense(f"{at}.attn.out_proj", size, size, None),
        attention_norm=weights.norm(f"{at}.norm1", size, eps),
        up=weights.fused([f"{at}.mlp.fc12", f"{at}.mlp.fc11"], inner, size, None),
        down=weights.dense(f"{at}.mlp.fc2", size, inner, None),
        mlp_norm=weights.norm(f"{at}.norm2", size, eps),
        heads=heads,
        activation=_activation(settings),
        gated=True,
        rotary=_rotary(settings, size // heads),
    )


def _activation(settings: Settings) -> str:
    name = settings.get("hidden_act", "activation_function", default="swiglu")
    found = ACTIVATION_NAMES.get(GATES.get(name, name) or "")
    if found is None:
        raise settings.wrong("activation_function", name, " or ".join(map(repr, ("swiglu", "geglu", "silu", "gelu"))))
    return found


def _rotary(settings: Settings, head_size: int) -> Rotary:
    parameters = settings.get("rope_parameters", default={})
    if parameters.get("rope_type", "default") != "default":
        raise settings.wrong("rope_parameters", parameters, "the rope_type 'default'")
    base = parameters.get("rope_theta") or settings.number("rotary_emb_base", "rope_theta", default=1000.0)
    fraction = settings.number("rotary_emb_fraction", default=1.0)
    return Rotary(int(head_size * fraction), float(base), bool(settings.get("rotary_emb_interleaved", default=False)))
