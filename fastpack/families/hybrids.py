"""Families with recurrences, state spaces, linear attention or convolutions, mostly with attention in other layers.

Those that a kernel runs on packed tokens have a ``scan``; the others run on one row for each sequence.
"""

from dataclasses import replace

from fastpack.families.mixer_spec import DeltaNetSpec, GatedConvSpec, KimiDeltaSpec, Mamba2Spec, MixerSpec
from fastpack.families.shared_specs import (
    DELTA_NORM,
    FALCON_H1_ATTENTION,
    GEMMA_NORM,
    GLM5_EXPERTS,
    GRANITE_MOE_HEAD,
    GRANITE_MOE_MLP,
    KDA_NORM,
    KIMI_ATTENTION,
    KIMI_LAYER,
    LARA_NORM,
    LFM2_MLP,
    LFM2_PARTS,
    LLAMA_ATTENTION,
    LLAMA_HEAD,
    LLAMA_MLP,
    LLAMA_NORM,
    LLAMA_PARTS,
    MAMBA2_NORM,
    MISTRAL_ATTENTION,
    MIXTRAL_EXPERTS,
    MIXTRAL_HEAD,
    MIXTRAL_PARTS,
    NEMOTRON_EXPERTS,
    OLMO2_ATTENTION,
    OLMO2_LAYER,
    OLMO2_NORM,
    QWEN3_ATTENTION,
    QWEN3_NEXT,
    QWEN3_NEXT_LAYER,
    QWEN3_NEXT_MOE,
    UNGROUPED_NORM,
    named,
)
from fastpack.families.spec import Family

_ON_ROWS = MixerSpec()
_CONV = MixerSpec(scan="conv", fast=GatedConvSpec())
_SSD = MixerSpec(scan="ssd", fast=Mamba2Spec())
_FALCON_H1 = replace(_SSD, fast=Mamba2Spec(scale="ssm_in_multiplier", scales="mup_vector", norm_if="mamba_rms_norm"))
_DELTA = MixerSpec(scan="gated_delta")
_QWEN3_5 = replace(_DELTA, fast=DeltaNetSpec())
_QWEN3_NEXT = replace(
    _DELTA, fast=DeltaNetSpec(inner=("in_proj_qkvz", "in_proj_ba"), split="fix_query_key_value_ordering")
)
_OLMO_HYBRID = replace(
    _DELTA,
    fast=DeltaNetSpec(
        inner=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
        norm="o_norm",
        out="o_proj",
        doubled_if="allow_neg_eigval",
    ),
)
_KDA = MixerSpec(scan="kda")
_KIMI = replace(_KDA, fast=KimiDeltaSpec())


HYBRID_FAMILIES: tuple[Family, ...] = (
    Family(
        "bailing_hybrid",
        "BailingHybridModel",
        ("BailingHybridAttention",),
        mixers={"BailingHybridDeltaAttention": _KDA},
        fast=named("BailingHybrid", **MIXTRAL_PARTS, RMSNormGated=KDA_NORM),
        routers=("BailingHybridTopkRouter",),
    ),
    Family(
        "bamba",
        "BambaModel",
        ("BambaAttention",),
        mixers={"BambaMixer": _SSD},
        fast=named("Bamba", Attention=LLAMA_ATTENTION, RMSNorm=LLAMA_NORM, RMSNormGated=MAMBA2_NORM, MLP=LLAMA_MLP),
        earlier=named("Bamba", RMSNormGated=UNGROUPED_NORM),
    ),
    Family(
        "falcon_h1",
        "FalconH1Model",
        ("FalconH1Attention",),
        mixers={"FalconH1Mixer": _FALCON_H1},
        fast=named("FalconH1", Attention=FALCON_H1_ATTENTION, RMSNorm=LLAMA_NORM),
    ),
    Family(
        "falcon_mamba",
        "FalconMambaModel",
        mixers={"FalconMambaMixer": _ON_ROWS},
        fast=named("FalconMamba", RMSNorm=LLAMA_NORM),
    ),
    Family(
        "glm5_next_text",
        "Glm5NextTextModel",
        package="glm5_next",
        mixers={
            "Glm5NextTextAttention": MixerSpec("real", carried="prev_topk_indices"),
            "Glm5NextTextLinearAttention": _KIMI,
        },
        fast=named(  # its MLP clamps
            "Glm5NextText", RMSNorm=LLAMA_NORM, RMSNormGated=KDA_NORM, Experts=GLM5_EXPERTS
        ),
        routers=("Glm5NextTextTopkRouter",),
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridModel",
        ("GraniteMoeHybridAttention",),
        mixers={"GraniteMoeHybridMambaLayer": _SSD},
        fast=named(
            "GraniteMoeHybrid",
            Attention=LLAMA_ATTENTION,
            RMSNorm=LLAMA_NORM,
            RMSNormGated=MAMBA2_NORM,
            MLP=GRANITE_MOE_MLP,
            Experts=MIXTRAL_EXPERTS,
            ForCausalLM=GRANITE_MOE_HEAD,
        ),
        earlier=named("GraniteMoeHybrid", RMSNormGated=UNGROUPED_NORM),
        routers=("GraniteMoeHybridTopKRouter",),
    ),
    Family(
        "jamba",
        "JambaModel",
        ("JambaAttention",),
        mixers={"JambaMambaMixer": _ON_ROWS},
        fast=named("Jamba", **MIXTRAL_PARTS, Attention=LLAMA_ATTENTION, ForCausalLM=MIXTRAL_HEAD),
        routers=("JambaTopKRouter",),
    ),
    Family(
        "kimi_linear",
        "KimiLinearModel",
        ("KimiLinearAttention",),
        mixers={"KimiLinearDeltaAttention": _KIMI},
        fast=named(
            "KimiLinear",
            **MIXTRAL_PARTS,
            Attention=KIMI_ATTENTION,
            RMSNormGated=KDA_NORM,
            DecoderLayer=KIMI_LAYER,
        ),
        routers=("KimiLinearTopkRouter",),
    ),
    Family(
        "lara_mini",
        "LaraMiniModel",
        ("LaraMiniAttention",),
        mixers={"LaraMiniGatedDeltaNet": _DELTA},
        fast=named(
            "LaraMini",
            Attention=QWEN3_ATTENTION,
            RMSNorm=OLMO2_NORM,
            RMSNormGated=LARA_NORM,
            MLP=LLAMA_MLP,
            Experts=MIXTRAL_EXPERTS,
            ForCausalLM=MIXTRAL_HEAD,
        ),
        routers=("LaraMiniTopKRouter",),
    ),
    Family(
        "lfm2",
        "Lfm2Model",
        ("Lfm2Attention",),
        mixers={"Lfm2ShortConv": _CONV},
        fast=named("Lfm2", **LFM2_PARTS, ForCausalLM=LLAMA_HEAD),
    ),
    Family(
        "lfm2_moe",
        "Lfm2MoeModel",
        ("Lfm2MoeAttention",),
        mixers={"Lfm2MoeShortConv": _CONV},
        fast=named("Lfm2Moe", **LFM2_PARTS, Experts=MIXTRAL_EXPERTS),
        routers=("Lfm2MoeTopKRouter",),
    ),
    Family(
        "lfm3",
        "Lfm3Model",
        ("Lfm3Attention",),
        mixers={"Lfm3ShortConv": _CONV},
        fast=named("Lfm3", RMSNorm=LLAMA_NORM, MLP=LFM2_MLP, ForCausalLM=LLAMA_HEAD),
    ),
    Family("mamba", "MambaModel", mixers={"MambaMixer": _ON_ROWS}, fast=named("Mamba", RMSNorm=LLAMA_NORM)),
    Family(
        "mamba2",
        "Mamba2Model",
        mixers={"Mamba2Mixer": _SSD},
        fast={**named("Mamba2", RMSNorm=LLAMA_NORM), **named("Mamba", RMSNormGated=MAMBA2_NORM)},
        earlier=named("Mamba", RMSNormGated=UNGROUPED_NORM),
    ),
    Family(
        "minimax",
        "MiniMaxModel",
        ("MiniMaxAttention",),
        mixers={"MiniMaxLightningAttention": MixerSpec(states=1)},
        fast=named("MiniMax", Attention=MISTRAL_ATTENTION, RMSNorm=LLAMA_NORM, Experts=MIXTRAL_EXPERTS),
        routers=("MiniMaxTopKRouter",),
    ),
    Family(
        "nemotron_h",
        "NemotronHModel",
        ("NemotronHAttention",),
        mixers={"NemotronHMamba2Mixer": _SSD},
        fast=named(
            "NemotronH",
            Attention=LLAMA_ATTENTION,
            RMSNorm=OLMO2_NORM,
            RMSNormGated=MAMBA2_NORM,
            Experts=NEMOTRON_EXPERTS,
        ),
        earlier=named("NemotronH", RMSNorm=LLAMA_NORM),
        routers=("NemotronHTopkRouter",),
    ),
    Family(
        "olmo_hybrid",
        "OlmoHybridModel",
        ("OlmoHybridAttention",),
        mixers={"OlmoHybridGatedDeltaNet": _OLMO_HYBRID},
        fast=named(
            "OlmoHybrid",
            Attention=OLMO2_ATTENTION,
            RMSNorm=OLMO2_NORM,
            RMSNormGated=DELTA_NORM,
            MLP=LLAMA_MLP,
            AttentionDecoderLayer=OLMO2_LAYER,
            LinearAttentionDecoderLayer=QWEN3_NEXT_LAYER,
            ForCausalLM=LLAMA_HEAD,
        ),
    ),
    Family(
        "qwen3_5_text",
        "Qwen3_5TextModel",
        ("Qwen3_5Attention",),
        package="qwen3_5",
        mixers={"Qwen3_5GatedDeltaNet": _QWEN3_5},
        fast=named("Qwen3_5", **QWEN3_NEXT),
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeTextModel",
        ("Qwen3_5MoeAttention",),
        package="qwen3_5_moe",
        mixers={"Qwen3_5MoeGatedDeltaNet": _QWEN3_5},
        fast=named("Qwen3_5Moe", **QWEN3_NEXT_MOE),
        routers=("Qwen3_5MoeTopKRouter",),
    ),
    Family(
        "qwen3_next",
        "Qwen3NextModel",
        ("Qwen3NextAttention",),
        mixers={"Qwen3NextGatedDeltaNet": _QWEN3_NEXT},
        fast=named("Qwen3Next", **QWEN3_NEXT_MOE),
        routers=("Qwen3NextTopKRouter",),
    ),
    Family(
        "recurrent_gemma",
        "RecurrentGemmaModel",
        ("RecurrentGemmaAttention",),
        mixers={"RecurrentGemmaRecurrentBlock": _ON_ROWS},
        fast=named("RecurrentGemma", RMSNorm=GEMMA_NORM),
        since=((5, 13), "has attention that no interface serves"),
    ),
    Family("rwkv", "RwkvModel", mixers={"RwkvSelfAttention": _ON_ROWS, "RwkvFeedForward": _ON_ROWS}),
    Family("xlstm", "xLSTMModel", mixers={"xLSTMLayer": MixerSpec(states=1)}),
    Family(
        "zamba",
        "ZambaModel",
        ("ZambaAttention",),
        mixers={"ZambaMambaMixer": _ON_ROWS},
        fast=named("Zamba", **LLAMA_PARTS),
    ),
    Family(
        "zamba2",
        "Zamba2Model",
        ("Zamba2Attention",),
        mixers={"Zamba2MambaMixer": _SSD},
        fast=named("Zamba2", RMSNorm=LLAMA_NORM, RMSNormGated=MAMBA2_NORM),
    ),
)
