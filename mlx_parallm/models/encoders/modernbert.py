"""ModernBERT: norms before the layers, rotary positions, gated MLPs; most layers see only what is near a token."""

from mlx_parallm.models.encoders.encoder_layers import ACTIVATION_NAMES, Embeddings, Encoder, EncoderLayer, Rotary
from mlx_parallm.models.encoders.encoder_weights import Settings, Weights

MODEL_TYPES = ("modernbert",)
PREFIXES = ("", "model.")
THETAS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}


def build(settings: Settings, weights: Weights) -> Encoder:
    size = settings.size("hidden_size")
    eps = settings.number("norm_eps", default=1e-5)
    heads = settings.size("num_attention_heads")
    depth = settings.size("num_hidden_layers")
    if size % heads:
        raise settings.wrong("num_attention_heads", heads, f"a divisor of the hidden size {size}")
    bias = bool(settings.get("norm_bias", default=False))
    embeddings = Embeddings(
        word=weights.take("embeddings.tok_embeddings.weight", -1, size),
        norm=weights.norm("embeddings.norm", size, eps, bias),
    )
    kinds = _layer_types(settings, depth)
    return Encoder(
        family="modernbert",
        embeddings=embeddings,
        layers=[_layer(settings, weights, index, kind) for index, kind in enumerate(kinds)],
        max_length=settings.size("max_position_embeddings", default=8192),
        final_norm=weights.norm("final_norm", size, eps, bias),
    )


def _layer_types(settings: Settings, depth: int) -> list[str]:
    every = settings.size("global_attn_every_n_layers", default=3)
    default = ["sliding_attention" if index % every else "full_attention" for index in range(depth)]
    kinds = settings.get("layer_types", default=default)
    if not isinstance(kinds, list) or len(kinds) != depth or not set(kinds) <= set(THETAS):
        raise settings.wrong("layer_types", kinds, f"{depth} of {', '.join(THETAS)}")
    return kinds


def _layer(settings: Settings, weights: Weights, index: int, kind: str) -> EncoderLayer:
    at = f"layers.{index}"
    size = settings.size("hidden_size")
    inner = settings.size("intermediate_size")
    eps = settings.number("norm_eps", default=1e-5)
    norm_bias = bool(settings.get("norm_bias", default=False))
    attention_bias, mlp_bias = (bool(settings.get(name, default=False)) for name in ("attention_bias", "mlp_bias"))
    heads = settings.size("num_attention_heads")
    activation = settings.one_of("hidden_activation", list(ACTIVATION_NAMES), "gelu")
    return EncoderLayer(
        qkv=weights.dense(f"{at}.attn.Wqkv", 3 * size, size, attention_bias),
        out=weights.dense(f"{at}.attn.Wo", size, size, attention_bias),
        attention_norm=None if index == 0 else weights.norm(f"{at}.attn_norm", size, eps, norm_bias),
        up=weights.dense(f"{at}.mlp.Wi", 2 * inner, size, mlp_bias),
        down=weights.dense(f"{at}.mlp.Wo", size, inner, mlp_bias),
        mlp_norm=weights.norm(f"{at}.mlp_norm", size, eps, norm_bias),
        heads=heads,
        activation=ACTIVATION_NAMES[activation],
        gated=True,
        pre_norm=True,
        rotary=Rotary(size // heads, _theta(settings, kind)),
        window=None if kind == "full_attention" else settings.size("local_attention", default=128) // 2,
    )


def _theta(settings: Settings, kind: str) -> float:
    parameters = (settings.get("rope_parameters", default={})).get(kind) or {}
    if parameters.get("rope_type", "default") != "default":
        raise settings.wrong("rope_parameters", parameters, "the rope_type 'default'")
    name, default = THETAS[kind]
    if name in settings.values:  # null: as in the other layers
        default = settings.number("global_rope_theta", default=THETAS["full_attention"][1])
    return float(parameters.get("rope_theta") or settings.number(name, default=default))
