"""The families that the tiny models were written for: every name in the causal-LM mapping of transformers 5.24."""

from __future__ import annotations

from fastpack.cli.smoke import MOST_USED

_OTHERS = """
    apertus1p5_text dory exaone inkling2_loop_text lara_mini sarvam_mla sarvam_moe
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bart beam bert-generation big_bird bigbird_pegasus bitnet
    blenderbot blenderbot-small blt camembert cohere2_moe cohere_compass_text cpmant ctrl cwm data2vec-text diffllama
    doge dots1 dots3_note dots3_note_text electra emu3 ernie ernie4_5_moe exaone_moe flex_olmo flint fuyu gemma3n
    gemma4_assistant gemma4_unified gemma4_unified_assistant gemma4_unified_text git glm4_moe_lite got_ocr2 gpt-sw3
    gpt_neox_japanese granite_swa granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_moe hy_v3 hy_v4
    hyperclovax inkling2_text inkling_text internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm3 llama4
    longcat_flash marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral3
    mllama modernbert-decoder moshi moss_transcribe_diarize musicgen musicgen_melody mvp nanochat openai-gpt pegasus
    phi4_multimodal plbart prophetnet qwen3_5_moe qwen4_exp qwen4_exp_text reformer rembert roberta
    roberta-prelayernorm roc_bert roformer solar_open trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl
    xlnet xmod youtu zamba zaya
"""

OTHERS: tuple[str, ...] = tuple(_OTHERS.split())
KNOWN = MOST_USED + OTHERS
