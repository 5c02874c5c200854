"""The families that people fine-tune most, and then some: what `gists/smoke.sh` tries unless it is told otherwise."""

from __future__ import annotations

_MOST_USED = """
    llama mistral mixtral ministral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe_text
    gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text phi phi3 phimoe gpt2 gpt_neo gpt_neox gptj
    gpt_bigcode gpt_oss opt bloom falcon mpt mamba mamba2 falcon_mamba falcon_h1 jamba bamba zamba2 granite granitemoe
    granitemoehybrid nemotron nemotron_h cohere cohere2 olmo olmo2 olmo3 olmo_hybrid olmoe stablelm starcoder2
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 glm glm4 glm4_moe glm_moe_dsa ernie4_5 exaone4 hunyuan_v1_dense
    seed_oss smollm3 lfm2 lfm2_moe recurrent_gemma rwkv xlstm codegen persimmon dbrx biogpt minimax kimi_linear
    llama4_text bert
"""

MOST_USED: tuple[str, ...] = tuple(_MOST_USED.split())
