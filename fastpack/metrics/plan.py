"""What a model computes on each token, read from the model itself, module by module.

Sizes come from the modules, so they are those of the weights as they are meant (4-bit ones too); which gradients are
needed comes from what trains. In the lowest layer that trains, what comes before the first trained weight needs none:
modules are taken in the order mixer, its result, MLP, its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fastpack.flops import FULL, Attention, Layer, Load, Product, Span, StepFlops, forward_flops, training_flops
from fastpack.model.unwrap import find_parts
from fastpack.utils.modules import TOWERS, decoder_layers

_RESULTS = frozenset(
    {"o_proj", "out_proj", "c_proj", "dense", "wo", "output_linear", "out_lin"}
    | {"down_proj", "fc2", "fc_out", "dense_4h_to_h", "lin2", "w2"}
)
"""Names of the last layer of attention or of an MLP."""
_LATENTS = frozenset({"q_b_proj", "kv_b_proj"})
"""Those that read what another projection of the same attention made."""
_MIXERS = ("attn", "attention", "mixer", "mamba", "conv", "temporal", "ssm")
_SCORES = ("attention", "attn", "mla")
"""In the names of classes of scaled dot-product attention, but for those with one of the next in their names."""
_OTHERS = frozenset(
    {"lightning", "delta", "indexer", "rwkv", "lsh", "blocksparse", "diffllama", "mamba", "mixer", "rglru", "lstm"}
)
"""In the names of classes that mix tokens in a way that has no formula here."""
_CROSS = ("encoder_attn", "encoder_attention", "crossattention", "cross_attn")
"""Names of attention to another model's states, which decoders alone don't have."""
_PARTLY = frozenset(
    {"blt", "cpmant", "dory", "dots3_note", "dots3_note_text", "gemma3n", "gemma3n_text", "hrm_text", "longcat_flash"}
    | {"inkling2_loop_text", "minimax_m3_vl_text", "mllama", "mllama_text_model", "xlnet", "zaya"}
)
"""Families that run a layer several times or not at all, or have products that no module shows."""
_ROUTED = ("top_k", "num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token")


@dataclass(frozen=True)
class ModelPlan:
    """Products of a model.

    Attributes:
        layers: the decoder layers, and what else the backbone has.
        head: behind the backbone.
        spans: what tokens see, each once.
        uncounted: what has no formula here, in words; its operations are missing from the figures.
    """

    layers: tuple[Layer, ...]
    head: tuple[Product, ...]
    spans: tuple[Span, ...]
    uncounted: tuple[str, ...] = ()

    def training(self, load: Load) -> StepFlops:
        """What forward and backward need."""
        return training_flops(self.layers, self.head, load)

    def forward(self, load: Load, *, lora: bool = True) -> StepFlops:
        """What a forward alone needs; ``lora=False`` with the adapters switched off."""
        return forward_flops(self.layers, self.head, load, lora=lora)


@dataclass(frozen=True)
class _Unit:
    """A product where it stands.

    Attributes:
        name: its path in the layer.
        stage: orders mixer (0, 1), its result (2), MLP (3), its result (4).
        dense: False for experts.
        reads_trained: whether it is LoRA's B of an A that trains.
    """

    product: Product
    name: str
    stage: int = 0
    dense: bool = True
    reads_trained: bool = False


def read_plan(model: nn.Module) -> ModelPlan:
    """Read a model of transformers, plain or wrapped by PEFT, as it stands: what trains, what is checkpointed.

    Raises:
        UnsupportedModelError: there is no transformers model inside.
    """
    parts = find_parts(model)
    backbone: Any = parts.backbone
    reader = _Reader(backbone.config)
    layers = decoder_layers(backbone)
    inside = {id(layer) for layer in layers}
    alive = _trains(backbone.get_input_embeddings())
    outside = list(reader.units(backbone, leave=inside))
    found = [_layer([replace(unit, stage=0) for unit in outside], (), alive=alive, checkpointed=False)]
    alive = alive or _any_trains(outside)
    for index, layer in enumerate(layers):
        units = list(reader.units(layer))
        below = alive or any(p.requires_grad and p.ndim == 1 for p in layer.parameters())
        checkpointed = bool(getattr(layer, "gradient_checkpointing", False)) and (below or _any_trains(units))
        if not checkpointed or any("post" in name and _of_mlp(name) for name, _ in layer.named_children()):
            last: Any = None
        else:
            last = units[-1].name if units and units[-1].stage == 4 and all(u.dense for u in units) else None
        units = [replace(u, product=replace(u.product, recomputed=not _ends(u, last))) for u in units]
        trained = below or any(u.product.weight_grad for u in units if u.stage < 2)
        attentions = tuple(replace(a, backward=trained) for a in reader.attentions(layer, index) if a is not None)
        found.append(_layer(units, attentions, alive=below, checkpointed=checkpointed))
        alive = below or _any_trains(units)
    head = parts.head if parts.head is not None and parts.head is not backbone else None
    units = [] if head is None else list(reader.units(model_of(model, head), leave={id(backbone)}))
    products = tuple(replace(u.product, input_grad=alive or u.reads_trained) for u in units)
    spans = {attention.span for layer in found for attention in layer.attentions}
    return ModelPlan(tuple(found), products, tuple(spans), tuple(dict.fromkeys(reader.uncounted)))


def model_of(model: nn.Module, head: nn.Module) -> nn.Module:
    """What stands around the backbone: a value head's wrapper, which holds a head too, or the head."""
    inner: Any = model
    if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return inner if isinstance(getattr(inner, "pretrained_model", None), nn.Module) else head


def adapters_are_off(model: nn.Module) -> bool:
    """True inside PEFT's ``disable_adapter()``."""
    return any(getattr(module, "_disable_adapters", False) for module in model.modules())


def _ends(unit: _Unit, last: str | None) -> bool:
    """Whether this is the product behind which a layer ends: LoRA's A is needed for B's gradient, B is not."""
    if last is None:
        return False
    base = last.removesuffix(".lora_B")
    return unit.name in (base, f"{base}.lora_B")


def _layer(units: list[_Unit], attentions: tuple[Attention, ...], *, alive: bool, checkpointed: bool) -> Layer:
    """Which inputs need a gradient: all, if something below trains; else those behind an earlier trained stage."""
    trained = min((u.stage for u in units if u.product.weight_grad), default=5)
    products = []
    for unit in units:
        needed = alive or unit.reads_trained or trained < unit.stage
        products.append(replace(unit.product, input_grad=needed))
    return Layer(tuple(products), attentions, checkpointed)


def _any_trains(units: list[_Unit]) -> bool:
    return any(unit.product.weight_grad for unit in units)


def _trains(module: Any) -> bool:
    return module is not None and any(p.requires_grad for p in module.parameters())


def _of_mlp(name: str) -> bool:
    return any(part in name for part in ("feedforward", "mlp", "ffn", "ff_"))


class _Reader:
    """Finds products and attention, and notes what has no formula."""

    def __init__(self, config: Any) -> None:
        self.uncounted: list[str] = []
        self._config = config
        if config.model_type in _PARTLY:
            self._say(f"some of what {config.model_type} computes")

    def units(
        self, module: Any, path: str = "", *, times: int = 1, leave: set[int] | None = None, top: Any = None
    ) -> Iterator[_Unit]:
        """Products of a module and of those inside it, in the order in which they are registered.

        Args:
            path: where it stands in its layer.
            times: to how many of these experts a token goes.
            leave: ids of modules that are left out.
            top: the innermost block around it that says to how many experts tokens go.
        """
        if leave is not None and id(module) in leave:
            return
        top = module if _routed(module) is not None else top
        if hasattr(module, "base_layer"):
            yield from self._adapted(module, path, times, top)
            return
        if _is(module, "TrainableTokensWrapper"):  # PEFT's: whole rows of one weight, which enters one product
            trains = any(p.requires_grad for p in module.token_adapter.trainable_tokens_delta.values())
            trains = trains and not (module.disable_adapters or module.token_adapter.merged)
            for unit in self.units(module.original_module, path, times=times, leave=leave, top=top):
                yield replace(unit, product=replace(unit.product, weight_grad=trains))
            return
        if _is(module, "ModulesToSaveWrapper", "AuxiliaryTrainingWrapper"):
            active = [] if module.disable_adapters else module.active_adapters
            inner = module.modules_to_save[active[0]] if active else module.original_module
            yield from self.units(inner, path, times=times, leave=leave, top=top)
            return
        if "Norm" in type(module).__name__ and not any(True for _ in module.children()):
            return
        if isinstance(module, nn.Embedding | nn.ModuleDict):
            if isinstance(module, nn.ModuleDict):
                self._note(module, path)
            return
        sizes = _sizes(module)
        if sizes is not None:
            yield self._unit(path, *sizes, times=times, trains=_trains_weight(module))
            return
        yield from self._raw(module, path, times, top)
        if isinstance(module, nn.ModuleList) and path.endswith("experts") and len(module):
            share = _routed(top) or _routed(self._config)
            if share is None:
                self._say("how many experts a token goes to")
                return
            yield from self.units(module[0], f"{path}.0", times=times * share, top=top)
            return
        for name, child in module.named_children():
            if any(word in name for word in TOWERS):
                self._note(child, name)
            if any(word in name for word in (*TOWERS, *_CROSS)):
                continue
            yield from self.units(child, f"{path}.{name}" if path else name, times=times, leave=leave, top=top)

    def attentions(self, layer: nn.Module, index: int) -> Iterator[Attention | None]:
        """Scaled dot-product attention in a decoder layer."""
        for path, module in layer.named_modules():
            if any(word in path for word in _CROSS):
                continue
            name = type(module).__name__.lower()
            if (
                not any(_is_projection(child) for child in module.children())
                or name.endswith(("output", "mlp"))
                or hasattr(module, "base_layer")
            ):
                continue
            if any(word in name for word in _OTHERS):
                self._say(f"how {type(module).__name__} mixes tokens")
            elif any(word in name for word in _SCORES):
                yield self._attention(module, index)

    def _attention(self, module: Any, index: int) -> Attention | None:
        config = getattr(module, "config", self._config)
        heads = _first(module, "num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads")
        heads = heads or _first(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
        hidden = _first(config, "hidden_size", "n_embd", "d_model")
        size = _first(module, "qk_head_dim", "head_dim", "attention_head_size", "head_size", "d_head")
        size = size or _first(config, "head_dim") or (hidden // heads if hidden and heads else None)
        if not heads or not size:
            self._say(f"the scores of {type(module).__name__}")
            return None
        values = _first(module, "v_head_dim") or size
        for name, child in module.named_children():
            sizes = _sizes(getattr(child, "base_layer", child))
            if name in _RESULTS and sizes is not None and sizes[0] % values == 0:
                heads = sizes[0] // values  # those of this very layer
        return Attention(heads, size, values, self._span(module, config, index))

    def _span(self, module: Any, config: Any, index: int) -> Span:
        kinds = getattr(config, "layer_types", None)
        kind = kinds[index] if kinds and index < len(kinds) else None
        if kind == "chunked_attention":
            return Span(chunk=config.attention_chunk_size)
        if kind == "full_attention" or getattr(config, "use_sliding_window", True) is False:
            window = None
        elif hasattr(module, "sliding_window"):
            window = module.sliding_window
        else:
            window = getattr(config, "sliding_window", None)
        return Span(window=window) if isinstance(window, int) and window > 0 else FULL

    def _adapted(self, module: Any, path: str, times: int, top: Any) -> Iterator[_Unit]:
        """A layer that PEFT has wrapped: the base, and A and B of each adapter in force."""
        yield from self.units(module.base_layer, path, times=times, top=top)
        if not hasattr(module, "lora_A") or not all(hasattr(a, "in_features") for a in module.lora_A.values()):
            self._note(module, path)
            return
        if _is(module, "ParamWrapper") or getattr(module, "lora_embedding_A", None):
            self._note(module, path)
            return
        for adapter in module.active_adapters:
            if adapter not in module.lora_A or adapter in module.merged_adapters:
                continue
            first = module.lora_A[adapter].weight.requires_grad
            for part, reads_trained in (("lora_A", False), ("lora_B", first)):
                inner = getattr(module, part)[adapter]
                trains = inner.weight.requires_grad
                unit = self._unit(path, inner.in_features, inner.out_features, times=times, trains=trains)
                product = replace(unit.product, lora=True)
                yield replace(unit, name=f"{path}.{part}", product=product, reads_trained=reads_trained)
            if getattr(module, "use_dora", {}).get(adapter):
                self._say("DoRA's norms of the weights")

    def _raw(self, module: Any, path: str, times: int, top: Any) -> Iterator[_Unit]:
        """Weights that are parameters of the module itself: experts ``[E, ., .]``, routers ``[E, inputs]``."""
        share, experts = _routed(top) or _routed(self._config), getattr(module, "moe_num_experts", None)
        for name, parameter in module.named_parameters(recurse=False):
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            trains = parameter.requires_grad
            where = f"{path}.{name}" if path else name
            sizes = None
            if len(shape) == 3:
                sizes = shape[1:]
            elif len(shape) == 2 and name != "weight" and experts:
                sizes = (shape[0] // experts, shape[1])  # all experts below each other
            if share and sizes is not None:
                yield replace(self._unit(where, *sizes, times=share, trains=trains), dense=False)
            elif len(shape) == 2 and name == "weight":
                yield self._unit(path, shape[1], shape[0], times=times, trains=trains)
            elif len(shape) >= 2 and not name.endswith("bias"):
                self._note(module, where)

    def _unit(self, path: str, inputs: int, outputs: int, *, times: int, trains: bool) -> _Unit:
        product = Product(inputs, outputs, times=times, weight_grad=trains)
        name = path.rpartition(".")[2]
        if any(part in path.partition(".")[0].lower() for part in _MIXERS) or "attn" in path.lower():
            stage = 2 if name in _RESULTS else int(name in _LATENTS)
        else:
            stage = 4 if name in _RESULTS else 3
        return _Unit(product, path, stage, dense="expert" not in path)

    def _note(self, module: Any, path: str) -> None:
        if any(True for _ in module.parameters()):
            self._say(f"{type(module).__name__} ({path.rpartition('.')[2]})")

    def _say(self, what: str) -> None:
        self.uncounted.append(what)


def _sizes(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer or of a convolution over tokens, or None."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Conv1d):
        return module.in_channels // module.groups * module.kernel_size[0], module.out_channels
    if _is(module, "Conv1D"):  # transformers' own, a linear layer with its weight the other way round
        shape = getattr(module.weight, "ds_shape", module.weight.shape)
        return int(shape[0]), int(shape[1])
    return None


def _is_projection(module: Any) -> bool:
    return _sizes(getattr(module, "base_layer", module)) is not None or type(module).__name__.endswith("Linear")


def _is(module: Any, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)


def _trains_weight(module: Any) -> bool:
    return bool(module.weight.requires_grad)


def _first(source: Any, *names: str) -> int | None:
    """The first of these attributes that is a positive int."""
    for name in names:
        value = getattr(source, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _routed(source: Any) -> int | None:
    return None if source is None else _first(source, *_ROUTED)
